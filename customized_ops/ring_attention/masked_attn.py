"""Attention under any mask: the op that takes an :class:`AttnMask`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .core.comm import Comm
from .core.comm.comm_groups import GroupLike
from .core.layout import Layout
from .core.mask import AttnMask
from .op.arguments import ArgumentError, Options
from .op.attention_family import Arguments, Family, Problem, has_data
from .op.attention_layout import layout_of
from .op.attention_op import call_op, declare
from .op.attention_repeat import Pattern

TITLE = "wrap_masked_attn_func"


def _problem(title: str, given: Arguments, rows: int, comm: Comm) -> Problem:
    mask = _mask(given)
    spec = given["layout"]
    k_spec = given["k_layout"] or (spec if mask.q_len == mask.k_len else "")
    q_layout = layout_of(title, comm, "layout", spec, rows, mask.q_len)
    k_layout = layout_of(title, comm, "k_layout", k_spec, given["k"].shape[1], mask.k_len)
    return Problem(mask, q_layout, k_layout)


def _known(given: Arguments, q_len: int, k_len: int) -> AttnMask | None:
    read = has_data(given["mask_slices"]) and q_len == given["q_len"]
    return _mask(given) if read else None


def _mask(given: Arguments) -> AttnMask:
    slices = given["mask_slices"].detach().cpu().numpy()
    return _from_bytes(slices.tobytes(), given["q_len"], given["k_len"])


@lru_cache(maxsize=256)
def _from_bytes(slices: bytes, q_len: int, k_len: int) -> AttnMask:
    # Sound, and disjoint: they come from an AttnMask.
    return AttnMask._from_bytes(slices, q_len, k_len)


_tensors: dict[bytes, Tensor] = {}


@torch.compiler.assume_constant_result
def _as_tensor(slices: bytes) -> Tensor:
    """The slices of a mask, int64[n, 6]: from bytes, which torch.compile takes for a constant."""
    known = _tensors.get(slices)
    if known is None:
        table = np.frombuffer(slices, dtype=np.int64).reshape(-1, 6)
        known = torch.from_numpy(table.copy())
        # Kept for the next call, but for one that stands in a graph being traced.
        if not isinstance(known, FakeTensor):
            if len(_tensors) == 64:
                del _tensors[next(iter(_tensors))]
            _tensors[slices] = known
    return known


MASKED = Family(
    packed=False,
    tensors={"mask_slices": "s^ 6"},
    numbers={"q_len": int, "k_len": int},
    same_length=False,
    problem=_problem,
    all_rows=lambda given: given["q_len"],
    known=_known,
    otherwise=lambda given, q_len, k_len: AttnMask.dense(q_len, k_len),
)

MASKED_ATTN = declare(MASKED, "seqshard::masked_attn", TITLE)


def wrap_masked_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttnMask,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    process_group: GroupLike = None,
    *,
    return_lse: bool = False,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_seed: int | Tensor | None = None,
    layout: Layout | None = None,
    k_layout: Layout | None = None,
    kernel: str = "auto",
    reduce_dtype: torch.dtype | None = None,
    q_rows: tuple[int, int] | None = None,
    q_heads: tuple[int, int] | None = None,
    team_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``b l (g n) hd^, b l g hd^, b l g vd^ -> b l (g n) vd^``

    Attention under any mask, over sequences cut across the ranks of a group; with no group, over
    the tokens given. q and k may be of different lengths and lie in different layouts.

        AttnMask.prefix_lm(6, 2)      rank 0: tokens 0 1 2     rank 1: tokens 3 4 5
        x x . . . .
        x x . . . .                   each rank gets the keys that its rows attend, or sends its
        x x x . . .                   rows to the keys where that moves fewer bytes, and ranks with
        x x x x . .                   too much work give some away
        x x x x x .
        x x x x x x

    Args:
        q: [b, l, h, hd], this rank's tokens; any strides.
        k: [b, m, g, hd], v: [b, m, g, vd]; h is a multiple of g (grouped queries).
        mask: which pairs of the whole sequences attend, the same on every rank.
        softmax_scale: what scores are multiplied by; None means 1 / sqrt(hd).
        dropout_p: the share of probabilities that become 0, in [0, 1). Which ones is drawn by
            token, head and batch entry, so it is the same on any number of ranks.
        alibi_slopes: [h] or [b, h]: what a score loses per token of distance; the ends of q and k
            are aligned where their lengths differ. No gradient.
        deterministic: gradients are the same bit for bit from run to run, which costs some kernels
            time; out always is. ``torch.use_deterministic_algorithms(True)`` asks for it too.
        process_group: ranks over which the tokens are cut: a ProcessGroup, its global ranks in
            increasing order, or None. Leave it None under an auto-parallelizer, which fills it in.
        return_lse: also return the log-sum-exp of the scaled scores; gradients flow through it.
        softcap: scores are kept in (-softcap, softcap) by a tanh; 0 is none.
        sink: [h] logits that join the softmax with no value; learnable. On each rank their
            gradient is that of its rows: add up over the group.
        dropout_seed: an int or an int64 tensor [1], the same on every rank; None draws one from
            torch's generator, which then has to be seeded alike on all ranks.
        layout: which tokens of q each rank holds; None means ``Layout.contiguous``. It is that of
            k and v too where they are as long as q and ``k_layout`` is None.
        k_layout: which tokens of k and v each rank holds.
        kernel: ``"auto"``, which is the fastest that can do the call, or one by name: ``flash4``,
            ``flash3``, ``flash2``, ``te``, ``cudnn``, ``torch``, ``flex`` or ``reference``; or
            ``te_cp``, TransformerEngine's own context parallelism (see ``te_cp.py``).
        reduce_dtype: what gradients of k and v, and of rows of q computed elsewhere, travel in.
            They are added up in fp32 (fp64 for fp64), and None is that dtype; ``torch.bfloat16``
            halves their bytes and rounds them before they are added.
        q_rows: set by auto-parallelizers that bring k and v whole. (i, n): q is part i of n of the
            sequence, ceil(l / n) tokens each, and k and v are all of it; (0, 1) on one device asks
            for that.
        q_heads: set by auto-parallelizers: (i, n): q is part i of n, all alike, of the heads, and
            k and v have all of theirs.
        team_size: ranks, neighbours in the group, that share out the heads of the same rows
            (Ulysses); divides the group's size, at most h. 1 cuts the sequence alone, all ranks cut
            heads alone, a number between does both. None is what the plan finds the fastest.
    Returns:
        [b, l, h, vd] in q's dtype; with ``return_lse`` also [b, h, l], natural log, fp32 (fp64 for
        fp64). Rows that attend nothing are 0, their lse -inf (that of the sink, with a sink).

    Communication: as :func:`wrap_ring_attn_func`.

    Raises:
        ValueError: shapes, dtypes, heads, mask, layout or group do not fit; says what would.

    Masks as lists of slices: MagiAttention (SandAI, 2025) has four shapes of slice; band slices
    have them as special cases.
    """

    def tensors() -> dict[str, Tensor]:
        if not isinstance(mask, AttnMask):
            raise ArgumentError(
                f"{TITLE}: mask must be an AttnMask, such as AttnMask.causal(l), got {mask!r}"
            )
        return {"mask_slices": _as_tensor(mask.key[2])}

    def numbers() -> dict[str, Any]:
        return {"q_len": mask.q_len, "k_len": mask.k_len}

    options = Options(
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        alibi_slopes=alibi_slopes,
        sink=sink,
        return_lse=return_lse,
        kernel=kernel,
        layout=layout,
        k_layout=k_layout,
        deterministic=deterministic,
        reduce_dtype=reduce_dtype,
        q_rows=q_rows,
        q_heads=q_heads,
        team_size=team_size,
    )

    def values() -> tuple[Any, ...] | None:
        return mask.key if isinstance(mask, AttnMask) else None

    lengths = getattr(mask, "q_len", None), getattr(mask, "k_len", None)
    pattern = Pattern(lengths, numbers, tensors, values)
    return call_op(MASKED_ATTN, q, k, v, pattern, options, process_group)
