"""How fast kernels are, as measured: what "auto" picks by.

TFLOP/s of the forward and of the backward pass on one H200 in bf16, 32 query and 8 key heads of dim
128, with torch 2.11, cuDNN 9.19, flash-attn-4 4.0.0b36 and TransformerEngine 2.20.2. Only attended
pairs count, and a backward pass is 2.5 forward passes of work. "packed" are documents of a corpus,
"window" is one of 4096 tokens, "sparse" blocks of 512 tokens that see themselves and all before.
Figures of fewer tokens are not here: their time is the host's.
``tests/benchmarks/kernel_speed.py --speeds`` prints such figures.

A kernel that was not measured in a class of masks has no figure for it: it counts as no faster than
those before it in the registry, which lists the fastest first as far as one knows, see
:func:`fastest_first`. Nothing has figures on a CPU, in fp32 or in fp64: the registry decides there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from .protocol import Request

BACKWARD_WORK = 2.5  # of a forward pass: five products of matrices instead of two
HALF = (torch.bfloat16, torch.float16)

# Kernel -> class of masks -> tokens -> (forward, backward).
Figures = dict[int, tuple[float, float]]
SPEEDS: dict[str, dict[str, Figures]] = {
    "flash4": {
        "causal": {8192: (704, 592), 32768: (670, 603)},
        "packed": {8192: (527, 430), 32768: (617, 543)},
        "window": {8192: (666, 570), 32768: (630, 534)},
        "sparse": {8192: (687, 556)},
    },
    "te": {
        "causal": {8192: (615, 526), 32768: (599, 535)},
        "packed": {8192: (435, 339), 32768: (556, 467)},
        "window": {8192: (576, 496), 32768: (602, 472)},
        "sparse": {8192: (342, 326)},
    },
    "cudnn": {
        "causal": {8192: (614, 528), 32768: (599, 536)},
        "packed": {8192: (125, 219), 32768: (556, 466)},
        "sparse": {8192: (288, 325)},
    },
    "torch": {  # its FlashAttention-2
        "causal": {8192: (308, 287), 32768: (339, 323)},
        "packed": {8192: (256, 218), 32768: (332, 295)},
        "window": {8192: (260, 287), 32768: (294, 303)},
        "sparse": {8192: (270, 210)},
    },
    "flex": {
        "causal": {8192: (360, 178), 32768: (400, 228)},
        "packed": {8192: (240, 98), 32768: (375, 192)},
        "window": {8192: (354, 177), 32768: (377, 195)},
        "sparse": {8192: (379, 187)},
    },
}
# A class with hardly another speed, where one was not measured itself.
ALIKE = {"full": "causal"}


def seconds(kernel: str, request: Request) -> float:
    """Seconds that a kernel takes for a forward and a backward pass, for each 10^12 FLOP of the
    forward; infinite where nothing like it was measured.

    Args:
        kernel: its name. request: of it count device, dtype, shape class and tokens; of the
            measured lengths the nearest is taken, by ratio.
    """
    measured = SPEEDS.get(kernel, {})
    shape = request.shape_class
    figures = measured.get(shape) or measured.get(ALIKE.get(shape, shape))
    if request.device.type != "cuda" or request.dtype not in HALF or not figures:
        return math.inf
    forward, backward = figures[_nearest(request.tokens, figures)]
    return 1 / forward + BACKWARD_WORK / backward


def fastest_first(names: Iterable[str], request: Request) -> list[str]:
    """Kernels from the fastest to the slowest, by what was measured.

    A kernel without a figure for the request counts as fast as the slowest before it, and kernels
    that are as fast keep their order: so it comes after all that precede it in ``names``, and
    before those that follow and are slower than these.

    Args:
        names: all kernels, the fastest first as far as one knows. request: see :func:`seconds`.
    """
    expected: dict[str, float] = {}
    for name in names:
        measured = seconds(name, request)
        expected[name] = measured if math.isfinite(measured) else max(expected.values(), default=0)
    return sorted(expected, key=expected.__getitem__)


def _nearest(tokens: int, measured: Figures) -> int:
    return min(measured, key=lambda n: abs(math.log(max(tokens, 1) / n)))


def bucket(tokens: int) -> int:
    """``tokens`` rounded to a power of two, by ratio: requests of all lengths are few, so that a
    choice is made once for many. 0 stays 0."""
    return 1 << round(math.log2(tokens)) if tokens else 0
