"""Measured speeds of kernels, by which "auto" chooses, for each class of masks:

| class | slices | |
|---|---|---|
| full | one | whose band binds nowhere |
| causal | one | bound above only: how far ahead a row attends |
| packed | several, no row and no key in two | none bound below: documents |
| window | one or several, no row and no key in two | some bound below: how far back a row attends |
| sparse | | any others |

A class also says whether a kernel must support windows.

TFLOP/s of the forward and of the backward pass on one H200 in bf16, 32 query and 8 key heads of dim
128, with torch 2.11, cuDNN 9.19, flash-attn-4 4.0.0b36 and TransformerEngine 2.20.2. Only attended
pairs count, and a backward pass is 2.5 forward passes of work. "packed" are documents of a corpus,
"window" is one of 4096 tokens (1024 at 2048), "sparse" blocks of 512 tokens that see themselves and
all before them. cuDNN has no figures for documents, because it builds a graph for each new length.
"flash3" and "flash2" were measured on an H100 (flash-attn 2.8.4, and 3 of the same commit), where
"torch" had 0.96 to 1.08 times its figures here (except in "sparse").
``examples/benchmark/parts/kernel_speed.py --speeds`` prints such figures. There are none for CPUs,
fp32 and fp64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..mask import AttnMask
from ..mask.intervals import depth
from ..mask.slices import HI, K0, K1, LO, Q0, Q1
from .protocol.request import HALF, Request

SHAPE_CLASSES = ("full", "causal", "packed", "window", "sparse")
BACKWARD_WORK = 2.5  # of a forward pass: five products of matrices instead of two

# Kernel -> class of masks -> tokens -> (forward, backward).
Figures = dict[int, tuple[float, float]]
SPEEDS: dict[str, dict[str, Figures]] = {
    "flash4": {
        "causal": {2048: (495, 345), 8192: (714, 574), 32768: (669, 600)},
        "packed": {2048: (304, 222), 8192: (531, 429), 32768: (598, 538)},
        "window": {2048: (393, 310), 8192: (670, 571), 32768: (629, 533)},
        "sparse": {2048: (399, 388), 8192: (696, 568), 32768: (656, 361)},
    },
    "flash3": {
        "causal": {2048: (274, 356), 8192: (747, 570), 32768: (682, 619)},
        "packed": {2048: (130, 180), 8192: (558, 389), 32768: (661, 516)},
        "window": {2048: (272, 281), 8192: (705, 530), 32768: (702, 478)},
        "sparse": {2048: (68.3, 113), 8192: (287, 280), 32768: (571, 322)},
    },
    "flash2": {
        "causal": {2048: (224, 194), 8192: (321, 295), 32768: (361, 342)},
        "packed": {2048: (168, 135), 8192: (282, 220), 32768: (360, 310)},
        "window": {2048: (193, 179), 8192: (279, 283), 32768: (309, 305)},
        "sparse": {2048: (118, 125), 8192: (286, 206), 32768: (323, 233)},
    },
    "te": {
        "causal": {2048: (393, 309), 8192: (614, 520), 32768: (599, 536)},
        "packed": {2048: (192, 167), 8192: (434, 341), 32768: (583, 468)},
        "window": {2048: (345, 278), 8192: (568, 497), 32768: (601, 471)},
        "sparse": {2048: (61.7, 90.9), 8192: (170, 328), 32768: (573, 370)},
    },
    "cudnn": {
        "causal": {2048: (402, 308), 8192: (618, 528), 32768: (599, 535)},
        "sparse": {2048: (113, 134), 8192: (449, 329), 32768: (577, 371)},
    },
    "torch": {  # its FlashAttention-2
        "causal": {2048: (211, 192), 8192: (308, 287), 32768: (339, 325)},
        "packed": {2048: (149, 137), 8192: (256, 219), 32768: (331, 295)},
        "window": {2048: (176, 184), 8192: (256, 286), 32768: (289, 298)},
        "sparse": {2048: (111, 106), 8192: (264, 207), 32768: (288, 234)},
    },
    "flex": {
        "causal": {2048: (200, 51.1), 8192: (362, 178), 32768: (395, 228)},
        "packed": {2048: (87.6, 26.7), 8192: (241, 98.0), 32768: (375, 191)},
        "window": {2048: (68.1, 33.8), 8192: (355, 176), 32768: (377, 195)},
        "sparse": {2048: (225, 57.9), 8192: (373, 187), 32768: (408, 230)},
    },
}
SAME = 1.05


def seconds(kernel: str, request: Request) -> float:
    """Seconds that a kernel takes for a forward and a backward pass, per 10^12 FLOP of the forward,
    at the measured length that is nearest by ratio; infinite where there is no figure."""
    # Full attention is about as fast as causal, so it was not measured.
    shape = "causal" if request.shape_class == "full" else request.shape_class
    figures = SPEEDS.get(kernel, {}).get(shape)
    if request.device.type != "cuda" or request.dtype not in HALF or not figures:
        return math.inf
    nearest = min(figures, key=lambda n: abs(math.log(max(request.tokens, 1) / n)))
    forward, backward = figures[nearest]
    return 1 / forward + BACKWARD_WORK / backward


def fastest_first(names: Iterable[str], request: Request) -> list[str]:
    """Sort ``names`` by measured speed. They are all kernels, in the order to assume where nothing
    was measured.

    A kernel without a figure for the request is taken to be as fast as the slowest before it. One
    that is faster than an earlier one by less than SAME keeps its place: two cards differ by as
    much.
    """
    expected: dict[str, float] = {}
    for name in names:
        measured, before = seconds(name, request), expected.values()
        if math.isfinite(measured):
            expected[name] = max([measured, *(x for x in before if x < SAME * measured)])
        else:
            expected[name] = max(before, default=0)
    return sorted(expected, key=expected.__getitem__)


def bucket(tokens: int) -> int:
    """``tokens`` rounded to a power of two, by ratio, so that one choice serves many lengths. 0
    stays 0."""
    return 1 << round(math.log2(tokens)) if tokens else 0


def shape_class(mask: AttnMask) -> str:
    """The class of a mask, one of SHAPE_CLASSES. A mask that attends nothing is "full"."""
    slices = mask.slices
    if depth(slices[:, Q0], slices[:, Q1]) > 1 or depth(slices[:, K0], slices[:, K1]) > 1:
        return "sparse"
    if needs_window(mask):
        return "window"
    if len(slices) > 1:
        return "packed"
    bound_above = slices[:, HI] < slices[:, K1] - 1 - slices[:, Q0]
    return "causal" if bound_above.any() else "full"


def needs_window(mask: AttnMask) -> bool:
    """Whether a kernel must be able to bound how far back a row attends: some slice's lo binds.

    Where none does, no kernel call of a plan needs it. In a slice j - i is least in the corner
    k0 - (q1 - 1), so lo binds nowhere if lo <= k0 - q1 + 1. What a plan does to slices keeps that:
    clipping raises k0 or lowers q1 (:func:`~..slices.clip`), so the right side only grows; moving
    tokens to buffers shifts both sides equally (:func:`~..slices.shift`); and pieces over the same
    rows that are joined again take lo and k0 from one of them (``over_buffers.joined_keys``).
    """
    slices = mask.slices
    return bool((slices[:, LO] > slices[:, K0] - slices[:, Q1] + 1).any())
