"""The ops over one whole sequence a batch element: q, k, v [b, l, heads, d].

They differ in who computes a row and in what they are called; which pairs attend is said by
``causal``, a window and a number of sink tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from annotations import AnnotatedOp

from ..core.comm import Comm
from ..core.comm.comm_groups import GroupLike
from ..core.mask import AttnMask
from .arguments import ArgumentError, Options, flag_of, ring_group, tokens_of, window_bounds
from .attention_family import Arguments, Family, Problem
from .attention_layout import layout_of
from .attention_op import call_op
from .attention_repeat import Pattern


def sequence_mask(given: Arguments, q_len: int, k_len: int) -> AttnMask:
    """Of one sequence, from an op's arguments."""
    window = given["window_left"], given["window_right"]
    return _sequence_mask(q_len, k_len, given["causal"], window, given["sink_tokens"])


@lru_cache(maxsize=256)
def _sequence_mask(
    q_len: int, k_len: int, causal: bool, window: tuple[int, int], sink_tokens: int
) -> AttnMask:
    cu = [0, q_len], [0, k_len]
    return AttnMask.varlen(*cu, causal=causal, window=window, global_tokens=sink_tokens)


def _problem(title: str, given: Arguments, rows: int, comm: Comm) -> Problem:
    layout = layout_of(title, comm, "layout", given["layout"], rows, None)
    return Problem(sequence_mask(given, layout.total, layout.total), layout, layout)


DENSE = Family(
    packed=False,
    tensors={},
    numbers={"causal": bool, "window_left": int, "window_right": int, "sink_tokens": int},
    same_length=True,
    problem=_problem,
    all_rows=lambda given: given["k"].shape[1],
    known=sequence_mask,
    otherwise=sequence_mask,
)


def dense_attention(
    op: AnnotatedOp,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    *,
    causal: bool,
    window_size: Sequence[int],
    process_group: GroupLike,
    sink_tokens: int = 0,
    enable_ring: bool = True,
    max_seqlens: tuple[int | None, int | None] = (None, None),
    **unsupported: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Check a user's call of a dense attention op and make it; out, and lse if asked for."""
    title = op.record.title

    def numbers() -> dict[str, Any]:
        flag_of(title, "enable_ring", enable_ring)
        for side, longest in zip("qk", max_seqlens, strict=True):
            if longest is not None:
                raise ArgumentError(
                    f"{title}: max_seqlen_{side} goes with cu_seqlens_q and cu_seqlens_k, which "
                    f"are not given; leave it None, got {longest!r}"
                )
        left, right = window_bounds(title, window_size)
        return {
            "causal": flag_of(title, "causal", causal),
            "window_left": left,
            "window_right": right,
            "sink_tokens": tokens_of(title, "sink_tokens", sink_tokens),
        }

    pattern = Pattern((causal, window_size, sink_tokens, enable_ring, *max_seqlens), numbers)
    group = ring_group(enable_ring, process_group)
    return call_op(op, q, k, v, pattern, options, group, **unsupported)
