"""What this machine has: GPUs, the links between them, kernels, packages; and what to install.

Under torchrun, also how fast the links of a group of all ranks are, as its plans assume.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata, util
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..core.comm.comm_groups import group_comm
from ..core.comm.dist_comm import DistComm
from ..core.comm.one_sided.symmetric import CHOICE
from ..core.kernels import KERNELS
from ..core.plan.cost_model import times_alone
from .kernel_listing import problem_of, table

SECONDS = 20  # timeout of nvidia-smi


class Package(NamedTuple):
    """An optional package: its distribution, its module, its purpose, and where to get it."""

    distribution: str
    module: str
    purpose: str
    install: str
    arch: tuple[int, int] | None = None  # lowest compute capability that can use it; None: any


PACKAGES = (
    Package("flash-attn-4", "flash_attn.cute", "kernel flash4", "pip install '.[flash]'", (9, 0)),
    Package(
        "transformer-engine",
        "transformer_engine",
        "kernel te, and te_cp",
        "pip install '.[te]'",
        (9, 0),
    ),
    Package("flash-attn-3", "flash_attn_interface", "kernel flash3", "see its README"),
    Package("flash-attn", "flash_attn", "kernel flash2", "pip install flash-attn"),
    Package("nvidia-cudnn-frontend", "cudnn", "kernel cudnn_flex", "pip install '.[cudnn]'"),
    Package("triton", "triton", "fused merging, kernel flex", "comes with torch for CUDA", (8, 0)),
    Package(
        "nnscaler",
        "nnscaler",
        'engine="nnscaler"',
        "git clone https://github.com/msrasys/nnscaler && pip install ./nnscaler regex",
    ),
    Package(
        "flash-linear-attention",
        "fla",
        "kernel fla of linear attention and convolutions",
        "pip install '.[fla]'",
        (9, 0),
    ),
    Package(
        "causal-conv1d",
        "causal_conv1d",
        "kernel causal_conv1d of convolutions",
        "pip install causal-conv1d",
    ),
    Package("transformers", "transformers", "Hugging Face models", "pip install '.[hf]'"),
    Package("matplotlib", "matplotlib", "plan.draw()", "pip install '.[plot]'"),
)


def doctor() -> str:
    """The whole report as text; imports kernels' libraries only where there is a GPU for them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    advice = [f"- {line}" for line in _advice(device)] or ["- nothing"]
    return "\n".join(
        [
            table(_machine()),
            "",
            *_gpus(),
            "",
            table([("package", "version", "for", "install"), *map(_found, PACKAGES)]),
            "",
            table([("kernel", "here"), *_kernels(device)]),
            "",
            *_group(device),
            "to do:",
            *advice,
        ]
    )


def _machine() -> list[tuple[str, str]]:
    backends = [
        name
        for name in ("gloo", "nccl")
        if getattr(torch.distributed, f"is_{name}_available", lambda: False)()
    ]
    defaults = {"SEQSHARD_CHECK": "on CPUs only", CHOICE: "auto"}
    ours = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("SEQSHARD_")}
    cuda = torch.cuda.is_available()
    cudnn = cuda and torch.backends.cudnn.version()
    nccl = cuda and torch.distributed.is_nccl_available() and torch.cuda.nccl.version()
    return [
        ("system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"),
        ("python", platform.python_version()),
        (
            "torch",
            f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, cuDNN {cudnn or 'none'}",
        ),
        ("torch.distributed", ", ".join(backends) or "none"),
        ("NCCL", ".".join(map(str, nccl)) if nccl else "none"),
        ("C++ compiler", shutil.which(os.environ.get("CXX", "c++")) or "none"),
        *(defaults | ours).items(),
    ]


def _gpus() -> Iterator[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        yield "no GPU that torch sees"
        return
    rows = [("GPU", "name", "capability", "GiB", "writes into memory of")]
    for n in range(count):
        has = torch.cuda.get_device_properties(n)
        peers = ", ".join(map(str, _reached(n, count))) or "none"
        memory = f"{has.total_memory / 2**30:.0f}"
        rows.append((str(n), has.name, f"{has.major}.{has.minor}", memory, peers))
    yield table(rows)
    yield from _topology() if count > 1 else ()


def _reached(n: int, count: int) -> list[int]:
    """GPUs whose memory GPU n can write into."""
    others = (m for m in range(count) if m != n)
    return [m for m in others if torch.cuda.can_device_access_peer(n, m)]


def _topology() -> Iterator[str]:
    """The links between GPUs as nvidia-smi names them: NV18 is 18 NVLinks; PHB, NODE and SYS are
    paths through the host."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        yield f"links: nvidia-smi does not say ({error})"
        return
    yield "links, by nvidia-smi topo -m:"
    yield from (line.rstrip() for line in done.stdout.splitlines() if "GPU" in line)


def _group(device: torch.device) -> Iterator[str]:
    """The links of all ranks of a run under torchrun."""
    if not dist.is_torchelastic_launched():
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    comm = group_comm(dist.group.WORLD)
    costs, hosts = comm.costs, comm.costs.topology
    rows = [
        ("ranks of the run", "on", "messages by", "GB/s a rank and way", "us to start"),
        (
            str(comm.size),
            f"inside hosts, {hosts}" if hosts is not None else "one host",
            "one-sided writes" if comm.writes_to_peers else str(dist.get_backend()),
            f"{costs.link_bytes / 1e9:.3g}{times_alone(costs.link_alone)}",
            f"{costs.step_seconds * 1e6:.3g}",
        ),
    ]
    if hosts is not None:
        rate = f"{costs.between_bytes / 1e9:.3g}{times_alone(costs.between_alone)}"
        start = f"{costs.between_seconds * 1e6:.3g}"
        rows.append(("", "between hosts", str(dist.get_backend()), rate, start))
    dist.destroy_process_group()
    yield table(rows)
    if isinstance(comm, DistComm) and comm.links_from:
        yield f"(links were {comm.links_from})"
    if device.type == "cpu":
        yield "(links of CPUs are not measured: these are an H200's, by which plans are chosen)"
    yield ""


def _found(package: Package) -> tuple[str, str, str, str]:
    version = _version(package)
    install = "" if version is not None else package.install
    return package.distribution, version or "not installed", package.purpose, install


def _version(package: Package) -> str | None:
    """None if it is not installed. A module may be present without a distribution of its name."""
    try:
        return metadata.version(package.distribution)
    except metadata.PackageNotFoundError:
        top = package.module.partition(".")[0]
        alone = top == package.module and util.find_spec(top) is not None
        return "unknown version" if alone else None


def _kernels(device: torch.device) -> list[tuple[str, str]]:
    rows = []
    for name, kernel in KERNELS.items():
        problem = problem_of(kernel, device)
        rows.append((name, "yes" if problem is None else f"no: {problem}"))
    return rows


def _advice(device: torch.device) -> Iterator[str]:
    if device.type == "cpu":
        without = torch.version.cuda is None
        why = "this torch is built without CUDA" if without else "torch finds no CUDA device"
        yield f"{why}: attention runs on CPUs alone, and nnscaler does not run"
        return
    least = min(torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count()))
    if least < (8, 0):
        yield "GPUs older than Ampere have the reference kernel alone, which is slow"
    for package in PACKAGES:
        if package.arch is not None and least >= package.arch and _version(package) is None:
            yield f"{package.purpose}: {package.install}"
    count = torch.cuda.device_count()
    if any(len(_reached(n, count)) < count - 1 for n in range(count)):
        yield "GPUs do not all reach one another's memory: ranks send NCCL messages, more slowly"
    if not torch.distributed.is_nccl_available():
        yield "this torch has no NCCL, so no group of GPUs"
