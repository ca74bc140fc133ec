"""The kernel "flash4": flash-attn-4, whose kernels are compiled on first use, for Hopper and newer.

Pairs are attended by window calls, or by one block-sparse call where that is predicted to be
faster: many window calls cost launches and merging, while one block-sparse call is slower per tile.

The library's learnable sink is not used: ``op/bound.py`` adds sinks to what any kernel returns,
because a row whose keys come in parts must count its sink only once.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...index_table import IndexTable
from ...mask.slices import UNBOUNDED, normalise
from ...tape import call_library
from ..protocol.kernel import BackwardOperands, ForwardOperands, Grads, OutLse, Pairs
from ..protocol.request import HALF, Capabilities, Request
from ..protocol.scoring import Scoring, Tokens
from ..window import library_calls, windowed
from ..window.columns import cut_to, first_columns, inputs_of_same_width, operands_of_same_width
from ..window.library_calls import PACKED_ARGUMENTS, CallLimits, LibraryCall, LibraryCalls
from ..window.lowering import Window
from ..window.signatures import lacking
from ..window.windowed import NOWHERE, GradientPlaces
from .flash4_parts import flash4_blocks, flash4_choice, flash4_library
from .flash4_parts.flash4_choice import LEAST, Operands, blocks_if_faster

NAME = "flash4"


@dataclass(frozen=True)
class Flash4Capabilities(Capabilities):
    """GPUs newer than Hopper have fewer kernels."""

    def refuses(self, request: Request) -> str | None:
        if (reason := super().refuses(request)) is not None:
            return reason
        widths = request.head_dim, request.v_dim
        if not _go_together(*widths, grouped=request.q_heads != request.kv_heads):
            widths = max(widths), max(widths)
        major, _ = torch.cuda.get_device_capability(request.device)
        if major == 9:
            return None
        if major > 11:
            return f"was not made for compute capability {major}"
        if widths not in ((192, 128), (256, 256)) and max(widths) > 128:
            return f"takes head dims up to 128, 192 and 128, or 256 here, not {widths}"
        asked = [name for name in ("softcap", "lse gradient") if name in request.features]
        if widths == (256, 256) and asked:
            return f"has no {', '.join(asked)} for head dim 256 here"
        return None


CAPABILITIES = (
    Flash4Capabilities(
        device="cuda",
        dtypes=HALF,
        features=("softcap", "window", "lse gradient", "deterministic", "64-bit indices"),
        widest=256,
        multiple=8,  # TMA moves 16 bytes at a time
        arch=(9, 0),
    ),
)

# The library's functions have no stable signatures: the arguments named here are checked once.
OPTIONS = (
    *("softmax_scale", "softcap", "causal", "window_size_left", "window_size_right"),
    *(*PACKED_ARGUMENTS, "mask_mod", "aux_tensors", "block_sparse_tensors"),
)
NEEDS = {
    "flash_attn.cute.interface._flash_attn_fwd": (
        *("q", "k", "v", "return_lse", "out", "lse", *OPTIONS),
    ),
    "flash_attn.cute.interface._flash_attn_bwd": (
        *("q", "k", "v", "out", "dout", "lse", "dlse", "deterministic", "dq", "dk", "dv", *OPTIONS),
    ),
    "flash_attn.cute.block_sparsity.BlockSparseTensorsTorch": (
        *("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "block_size"),
    ),
    "flash_attn.cute.utils.scalar_to_ssa": (),
}

MANY = 256  # segments of a call; the library has other kernels for more
LIMITS = CallLimits(least=LEAST, empty=True)
watched, unproven_tapes = flash4_library.watched, flash4_library.unproven_tapes


@cache
def missing() -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return "flash_attn.cute is not installed; pip install --pre flash-attn-4"
    for path, needs in NEEDS.items():
        module, name = path.rsplit(".", 1)
        try:
            function = getattr(importlib.import_module(module), name, None)
        except Exception as error:  # incompatible versions raise anything
            reason = f"flash_attn.cute does not import ({error}); pip install --pre flash-attn-4"
            if getattr(error, "name", "") != "flash_attn.cute":  # which FlashAttention-2 lacks
                warnings.warn(f"{reason}. Slower kernels take its place", stacklevel=2)
            return reason
        if function is None:
            return f"{module} has no {name}; that of 4.0.0b36 does"
        lacks = lacking(function, needs)
        if lacks:
            return f"flash_attn.cute's {name} takes no {', '.join(lacks)}; 4.0.0b36 does"
    return None


def _go_together(head_dim: int, v_dim: int, *, grouped: bool) -> bool:
    """Whether the library takes these widths of q and v as they are. It tests no unequal ones but
    192 and 128, for which it has no backward with fewer heads of k than of q."""
    return head_dim == v_dim or ((head_dim, v_dim) == (192, 128) and not grouped)


def _taken_as_they_are(given: Operands) -> bool:
    """Whether the library takes the widths of these operands."""
    q, k, v = given.q, given.k, given.v
    return _go_together(q.shape[-1], v.shape[-1], grouped=q.shape[2] != k.shape[2])


def prepare(pairs: Pairs) -> None:
    """Work out now, without a device, the window calls and the most common block lists."""
    library_calls.prepare(pairs, LIMITS)
    flash4_choice.prepare(pairs)


def tables(pairs: Pairs) -> list[IndexTable]:
    """The tables of window calls, and of block lists that were made ahead: which of the two a call
    uses depends on its operands."""
    ahead = flash4_blocks.known_tables(pairs, flash4_choice.COMMON_DIM)
    return [*library_calls.tables(pairs, LIMITS), *ahead]


def alike(
    given: Operands, pairs: Pairs, *, deterministic: bool = False
) -> tuple[Hashable, list[Tensor]] | None:
    """Window calls of one batch entry are launched alike where all but their tables is the same, if
    the library takes their widths."""
    if given.q.shape[0] != 1 or not _taken_as_they_are(given):
        return None
    backward = isinstance(given, BackwardOperands)
    if not deterministic and blocks_if_faster(given, pairs, backward=backward) is not None:
        return None
    todo = LibraryCalls.of(pairs, given[:3], LIMITS)
    return todo.kind, todo.packed


def forward(
    given: ForwardOperands, pairs: Pairs, scoring: Scoring, tokens: Tokens | None
) -> OutLse:
    inputs = given if _taken_as_they_are(given) else inputs_of_same_width(given)
    blocks = blocks_if_faster(inputs, pairs, backward=False)
    if blocks is not None:
        out, lse = flash4_blocks.forward(inputs, blocks, scoring)
    else:
        out, lse = windowed.forward(attend, inputs, pairs, scoring, LIMITS)
    return first_columns(out, given.v.shape[-1]), lse


def backward(
    given: BackwardOperands,
    pairs: Pairs,
    scoring: Scoring,
    tokens: Tokens | None,
    *,
    deterministic: bool = False,
) -> Grads:
    # Chosen anew, because out and lse mean the same whichever way the forward computed them.
    operands = given if _taken_as_they_are(given) else operands_of_same_width(given)
    # The library sums dq in a fixed order only in window calls.
    blocks = None if deterministic else blocks_if_faster(operands, pairs, backward=True)
    if blocks is not None:
        grads = flash4_blocks.backward(operands, blocks, scoring)
    else:
        grads = windowed.backward(
            attend_backward, operands, pairs, scoring, LIMITS, deterministic=deterministic
        )
    return cut_to(grads, given)


def compiled() -> int:
    """How many kernels the library has compiled in this process; see :func:`.warm_up`."""
    return flash4_library.compiled() if "flash_attn.cute.interface" in sys.modules else 0


def warm_up(
    given: BackwardOperands, scoring: Scoring, *, window: bool, deterministic: bool
) -> Iterator[None]:
    """Compile, one after the other, all kernels that documents of any lengths can need; ``window``
    says whether they attend a window. ``given`` has at least LEAST rows and as many keys."""
    length, inputs = given.q.shape[1], ForwardOperands(given.q, given.k, given.v)
    bounds = [(-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 0), (-UNBOUNDED, 1)]
    bounds += [(-1, UNBOUNDED), (-1, 0), (-1, 1)] if window else []
    for (low, high), count in product(bounds, (1, 2, MANY + 1)):
        ends = np.linspace(0, length, count + 1, dtype=np.int64)
        slices = [(a, b, a, b, low, high) for a, b in pairwise(ends)]
        pairs = Pairs(normalise(np.array(slices)), length, length)
        windowed.forward(attend, inputs, pairs, scoring, LIMITS)
        yield
        windowed.backward(
            attend_backward, given, pairs, scoring, LIMITS, deterministic=deterministic
        )
        yield
    if torch.cuda.get_device_capability(given.q.device)[0] == 9:
        yield from flash4_blocks.warm_up(given, scoring)


def attend(
    given: ForwardOperands, call: LibraryCall, scoring: Scoring, into: OutLse | None = None
) -> OutLse:
    q, k, v = given
    out, lse = (None, None) if into is None else into
    forward = flash4_library.interface()._flash_attn_fwd
    out, lse, *_ = call_library(
        forward, q=q, k=k, v=v, return_lse=True, out=out, lse=lse, **_options(call, scoring)
    )
    return out, lse


def attend_backward(
    given: BackwardOperands,
    call: LibraryCall,
    scoring: Scoring,
    *,
    deterministic: bool,
    into: GradientPlaces = NOWHERE,
) -> Grads:
    dq, dk, dv = call_library(
        flash4_library.interface()._flash_attn_bwd,
        **given._asdict(),  # which have the library's names
        dq=into[0],
        dk=into[1],
        dv=into[2],
        deterministic=deterministic,
        **_options(call, scoring),
    )
    return dq, dk, dv


def _options(call: LibraryCall, scoring: Scoring) -> dict[str, Any]:
    """What forward and backward are both given."""
    return {
        "softmax_scale": scoring.softmax_scale,
        "softcap": scoring.softcap,
        **_bounds(call.window),
        **(call.packing.arguments if call.packing else {}),
    }


@lru_cache(64)
def _bounds(window: Window) -> dict[str, Any]:
    """The window as arguments. The library has separate kernels for no bounds and causal ones."""
    left, right = (None if bound < 0 else bound for bound in window)
    causal = (left, right) == (None, 0)
    right = None if causal else right
    return {"causal": causal, "window_size_left": left, "window_size_right": right}
