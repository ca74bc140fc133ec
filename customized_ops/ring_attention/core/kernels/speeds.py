"""How fast kernels are, as measured: what "auto" picks by.

TFLOP/s of the forward and of the backward pass on one H200 in bf16, 32 query and 8 key heads of dim
128, with torch 2.11, cuDNN 9.19 and flash-attn-4 4.0.0b36. Only attended pairs count, and a
backward pass is 2.5 forward passes of work.

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
        "causal": {8192: (626, 535), 32768: (663, 600)},
        "packed": {32768: (604, 561)},  # 16 documents
        # By block lists: a window of 4096 tokens, and 16 documents as if they were any mask.
        "window": {32768: (579, 492)},
        "sparse": {32768: (553, 388)},
    },
    "cudnn": {"causal": {8192: (557, 501), 32768: (603, 529)}},
    "torch": {"causal": {8192: (312, 287), 32768: (345, 320)}},  # its FlashAttention-2
    # Of its 402, 341 and 373 backwards, less the time of the forward that it runs again there.
    "flex": {
        "causal": {32768: (431, 293)},
        "packed": {32768: (370, 249)},
        "window": {32768: (404, 272)},
        "sparse": {32768: (370, 249)},  # the 16 documents: documents are any mask to it
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
