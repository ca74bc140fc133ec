"""Speeds of this machine, measured by its own ranks and kept in a file of the user's cache.

    torchrun --nproc-per-node 4 -m annotations.engines.torch calibrate --mesh 2 2

What was not measured is planned with round numbers, and the plan says so.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

REPEATS = 5

_logger = logging.getLogger("seqshard")


@dataclass(frozen=True)
class Link:
    """The links between the ranks of one mesh axis: a collective in which n bytes are received
    takes ``seconds + n / bytes_per_second``."""

    seconds: float = 2e-5
    bytes_per_second: float = 2e11


@dataclass(frozen=True)
class Rates:
    """Speeds of one rank and of its links. The defaults are round numbers for one accelerator, not
    measurements; :func:`calibrate` measures.

    Attributes:
        links: one for each axis of the mesh, in order, and a last one for all ranks, over which
            gradients are summed. If there are fewer, the last stands for the rest.
        calibrated: whether they were measured.
    """

    matmul_flops_per_second: float = 3e14
    attention_flops_per_second: float = 3e14
    memory_bytes_per_second: float = 2e12
    links: tuple[Link, ...] = (Link(),)
    calibrated: bool = False

    def link(self, axis: int) -> Link:
        """The link of a mesh axis; -1 means all ranks."""
        return self.links[min(axis, len(self.links) - 1)]

    def by_bytes(self) -> Rates:
        """The same without the time to start a collective: the fewest bytes are then cheapest."""
        return replace(self, links=tuple(replace(link, seconds=0.0) for link in self.links))


def received_seconds(count: float, link: Link, rounds: int = 1) -> float:
    """Time of ``rounds`` collectives, one after the other, in which the busiest rank receives
    ``count`` bytes in total."""
    return rounds * link.seconds + count / link.bytes_per_second if count else 0.0


def known_rates(mesh: DeviceMesh, copies: int = 1) -> Rates:
    """What :func:`calibrate` found on this machine for such a mesh and number of copies of the
    model; round numbers if it never ran."""
    path = rates_file(mesh, copies)
    if not path.exists():
        return Rates()
    try:
        given = json.loads(path.read_text())["rates"]
        return Rates(**{**given, "links": tuple(Link(**link) for link in given["links"])})
    except (ValueError, KeyError, TypeError) as error:
        _logger.warning("%s is not a file of rates (%s); planning with round numbers", path, error)
        return Rates()


def rates_file(mesh: DeviceMesh, copies: int = 1) -> Path:
    """Where the rates of such a mesh are kept: by device, backend, sizes and torch version."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seqshard"
    digest = hashlib.sha256(json.dumps(_key(mesh, copies)).encode()).hexdigest()[:16]
    return folder / f"rates-{digest}.json"


def calibrate(mesh: DeviceMesh, copies: int = 1) -> Rates:
    """Measure for a second or two, on all ranks of the run at once; rank 0 saves the rates.

    Args:
        mesh: the ranks of this rank's copy. copies: data-parallel copies of the model.
    Returns:
        The rates of the slowest rank, the same on every rank.
    """
    device = torch.device(mesh.device_type)
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)] + [dist.group.WORLD]
    found = _compute_rates(device)
    with warnings.catch_warnings():
        # From torch 2.13 on all_gather_into_tensor has another name, which torch 2.11 lacks.
        warnings.filterwarnings("ignore", message=".*all_gather", category=FutureWarning)
        for group in groups:
            start, speed = _link(group, device)
            found += [1 / start, speed]
    speeds = torch.tensor(found, device=device, dtype=torch.float64)
    dist.all_reduce(speeds, op=dist.ReduceOp.MIN)
    matmul, attention, memory, *rest = speeds.tolist()
    links = tuple(Link(1 / a, b) for a, b in zip(rest[::2], rest[1::2], strict=True))
    rates = Rates(matmul, attention, memory, links, True)
    if dist.get_rank() == 0:
        path, kept = rates_file(mesh, copies), {"for": _key(mesh, copies), "rates": asdict(rates)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept, indent=1))
    dist.barrier()
    return rates


def _key(mesh: DeviceMesh, copies: int) -> dict[str, Any]:
    cuda = mesh.device_type == "cuda" and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else mesh.device_type,
        "backend": str(dist.get_backend()),
        "axes": [*mesh.shape, copies],
        "torch": torch.__version__,
    }


def _compute_rates(device: torch.device) -> list[float]:
    """Speeds of matrix products, of torch's own causal attention, and of memory."""
    cuda = device.type == "cuda"
    n, tokens, heads, size = (8192, 8192, 16, 2**28) if cuda else (512, 512, 4, 2**24)
    dtype = torch.bfloat16 if cuda else torch.float32
    a = torch.randn(n, n, device=device, dtype=dtype)
    q = torch.randn(1, heads, tokens, 128, device=device, dtype=dtype)
    memory = torch.zeros(size, device=device, dtype=torch.uint8)
    copy = torch.empty_like(memory)
    attend = functools.partial(F.scaled_dot_product_attention, q, q, q, is_causal=True)
    return [
        2 * n**3 / _seconds(lambda: a @ a, device),
        2 * heads * tokens**2 * 128 / _seconds(attend, device),
        2 * size / _seconds(lambda: copy.copy_(memory), device),
    ]


def _link(group: Any, device: torch.device) -> tuple[float, float]:
    """Seconds to start, and received bytes a second, of the slowest kind of collective."""
    large = 2**26 if device.type == "cuda" else 2**20
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return Link().seconds, Link().bytes_per_second
    starts, speeds = [], []
    rest = (ranks - 1) / ranks
    # Each with the share of its argument that a rank receives.
    collectives: list[tuple[Callable[[Tensor], Any], float]] = [
        (lambda x: dist.all_gather_into_tensor(x, x[: len(x) // ranks].clone(), group=group), rest),
        (lambda x: dist.all_to_all_single(torch.empty_like(x), x, group=group), rest),
        (lambda x: dist.all_reduce(x, group=group), 2 * rest),
    ]
    for collective, share in collectives:
        # Elements of fp32, the same number for each rank.
        tensors = [torch.zeros(n // 4 // ranks * ranks, device=device) for n in (ranks * 8, large)]
        small, whole = (_seconds(functools.partial(collective, x), device) for x in tensors)
        starts.append(small)
        speeds.append(share * large / max(whole - small, 1e-9))
    return max(starts), min(speeds)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call: the fastest of a few, after one to warm up."""
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-9)
