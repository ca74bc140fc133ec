"""How fast the links of a group are, as an earlier run on the same GPUs measured it and kept it in
a file of the user's cache.

All ranks use the file of the group's first rank, because all must plan by the same rates. There is
one file, of JSON, for each group of GPUs. If it cannot be read, links are measured anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..messages import Comm
from .link_probe import Link, Links

LINKS = "SEQSHARD_LINKS"  # an environment variable: whether links are measured anew
KEPT, MEASURE = "kept", "measure"  # its values
FORMAT = 3  # in 2, rates were of both ways alone; in 1, all messages had a group over all hosts


def require_choice() -> None:
    """Raises ValueError if the environment variable has another value."""
    if (choice := os.environ.get(LINKS, KEPT)) not in (KEPT, MEASURE):
        raise ValueError(f"{LINKS} must be {KEPT} or {MEASURE}, got {choice!r}")


def kept_or_probed(
    comm: Comm,
    hosts: tuple[int, ...],
    device: torch.device,
    backend: str,
    probe: Callable[[], Links],
) -> tuple[Links, str]:
    """The links of a group, and a text that says how they are known. All ranks call this together;
    all get the same links.

    Args:
        hosts: number of ranks on each host.
        device: this rank's. backend: what carries messages.
        probe: measures the links; all ranks call it together.
    """
    machines = comm.all_gather_object(_machine(device, backend))
    given = {"format": FORMAT, "hosts": list(hosts), "first": machines[0]}
    digest = hashlib.sha256(json.dumps([given, machines]).encode()).hexdigest()[:16]
    path = _folder() / f"links-{digest}.json"
    first, choice = comm.rank == 0, os.environ.get(LINKS, KEPT)
    links = _read(path, given) if first and choice == KEPT else None
    links = comm.all_gather_object(links)[0]
    if links is not None:
        return links, f"measured by an earlier run, in {path} ({LINKS}={MEASURE} measures anew)"
    links = probe()
    kept = first and _write(path, {**given, **links._asdict()})
    return links, "measured now" + f", kept in {path}" * kept


def _machine(device: torch.device, backend: str) -> dict[str, Any]:
    """What decides how fast the messages of a rank are, in types of JSON."""
    gpu = [str(device)]
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device)
        gpu = [has.name, str(has.uuid), str(torch.cuda.nccl.version())]
    names = [name for name in sorted(os.environ) if name.startswith("NCCL_")]
    settings = {n: os.environ[n] for n in names if not n.startswith("NCCL_DEBUG")}
    return {"host": socket.gethostname(), "gpu": gpu, "backend": backend, "settings": settings}


def _folder() -> Path:
    """The folder in the user's cache; not absolute where the system knows no home."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = given if given.is_absolute() else Path(os.path.expanduser("~/.cache"))
    return cache / "seqshard"


def _read(path: Path, given: dict[str, Any]) -> Links | None:
    """The links of a group that such a file has; None where it does not have them."""
    try:
        said = json.loads(path.read_text())
        each = [said[name] for name in Links._fields]
        links = Links(*(None if link is None else Link(*map(float, link)) for link in each))
        rates = [rate for link in links if link is not None for rate in link]
        there = [link is not None for link in links]
        several = [max(given["hosts"]) > 1, len(given["hosts"]) > 1]
        good = there == several and all(0 < rate < math.inf for rate in rates)
        good = good and all(1 <= link.alone <= 2 for link in links if link is not None)
        return links if good and all(said[name] == given[name] for name in given) else None
    except Exception:  # whatever it is, the peers must not wait for this rank
        return None


def _write(path: Path, said: dict[str, Any]) -> bool:
    """Write the file, and return whether it is there. It appears whole, as others may read it."""
    if not path.is_absolute():
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            try:
                json.dump(said, file, indent=1)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError:  # no room, or not the user's: the next run measures again
        return False
    return True
