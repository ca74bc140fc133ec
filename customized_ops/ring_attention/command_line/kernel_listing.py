"""The kernels of this machine in a table, and which of them "auto" takes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

import torch

from ..core.kernels import KERNELS, Capabilities, Kernel, Request
from ..core.kernels.choice import fastest
from ..core.kernels.speeds import SHAPE_CLASSES
from ..core.run import te_cp

# The distribution that each kernel comes from, whose version is read without an import.
DISTRIBUTIONS = {
    "flash4": "flash-attn-4",
    "flash3": "flash-attn-3",
    "flash2": "flash-attn",
    "te": "transformer-engine",
    "cudnn": "torch",
    "torch": "torch",
    "flex": "torch",
    "cudnn_flex": "nvidia-cudnn-frontend",
    "reference": "torch",
}

LISTED_TOKENS = (2048, 8192, 32768)  # the lengths for which a listing shows the choice


def kernels() -> str:
    """The listing for this machine's device, and the kernels that run only if chosen by name."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = ", ".join(te_cp.COMMS)
    return f"{listing(device)}\n\nBy name only, where te runs, over several ranks: {names}"


def listing(device: torch.device) -> str:
    """Every kernel of the registry, and the choice for common requests on ``device``.

    Where ``device`` is a GPU this imports the libraries of the kernels for GPUs, if installed.
    """
    kernels = [("kernel", "version", "here", "device", "dtypes", "head dims", "features")]
    notes: list[str] = []
    for name, kernel in KERNELS.items():
        problem, here = problem_of(kernel, device), "yes"
        if problem is not None:
            notes += [] if problem in notes else [problem]
            here = f"no [{notes.index(problem) + 1}]"
        for n, can in enumerate(kernel.CAPABILITIES):
            first = (name, _version(name), here) if n == 0 else ("", "", "")
            kernels.append((*first, *_abilities(can)))
    taken = [("auto takes", *(f"{length // 1024}K tokens" for length in LISTED_TOKENS))]
    for shape in SHAPE_CLASSES:
        taken.append((shape, *(_taken(device, shape, length) for length in LISTED_TOKENS)))
    below = [f"[{n}] {note}" for n, note in enumerate(notes, 1)]
    asked = f"For training on {device.type} in bf16, 32 query and 8 key heads of dim 128"
    asked += ", by figures measured on an H200:" if device.type == "cuda" else ":"
    return "\n".join([table(kernels), *below, "", asked, table(taken)])


def problem_of(kernel: Kernel, device: torch.device) -> str | None:
    """Why a kernel does not run on this machine; only kernels that might are asked themselves."""
    if device.type == "cpu" and all(can.device == "cuda" for can in kernel.CAPABILITIES):
        return "no CUDA device"
    for can in kernel.CAPABILITIES:
        if can.device == device.type == "cuda" and can.other_arch(device):
            return can.other_arch(device)
    return kernel.missing()


def _version(name: str) -> str:
    distribution = DISTRIBUTIONS[name]
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return f"{distribution} not installed"


def _abilities(can: Capabilities) -> tuple[str, str, str, str]:
    device = can.device
    if can.arch > (0, 0):
        device += f" from {'.'.join(map(str, can.arch))}"
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in can.dtypes)
    dims = "any" if can.widest is None else f"up to {can.widest}"
    dims += f", multiples of {can.multiple}" if can.multiple > 1 else ""
    return device, dtypes, dims, ", ".join(can.features) or "none"


def _taken(device: torch.device, shape: str, tokens: int) -> str:
    features = ("window",) if shape == "window" else ()
    sizes = (128, 128, 32, 8)
    request = Request(device, torch.bfloat16, *sizes, features, shape, tokens)
    return fastest(request)[0] or "none"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cells."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)
