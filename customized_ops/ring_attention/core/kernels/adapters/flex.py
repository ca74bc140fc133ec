"""FlexAttention: any mask by blocks, compiled by torch for the scoring at hand (Dong et al.,
"Flex Attention: A Programming Model for Generating Optimized Attention Kernels", 2024).

It has no backward that takes the final out and lse, only autograd of its own out and lse. So the
backward attends the part again and sends gradients through it that make up for the difference. With

    p_ij = exp(s_ij - lse_i)            the part's own softmax
    w_i  = exp(lse_i - final_lse_i)     what the part weighs in the row

the gradients wanted are

    ds_ij = w_i p_ij (dout_i.v_j - dout_i.final_out_i + dlse_i)     dv_j = sum_i w_i p_ij dout_i

and autograd of (out, lse) along (g, c) gives

    ds_ij = p_ij (g_i.v_j - g_i.out_i + c_i)                        dv_j = sum_i p_ij g_i

which agrees for g = w dout and c = w (dout.out - dout.final_out + dlse). A row that attends nothing
here has w = 0. A sink is in the final lse and out, and so in w.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from annotations.library.define import autograd_on

from ...mask.slices import K0, Slices
from ...merge.merge import Accumulator, Sum, accumulation_dtype
from ..protocol.kernel import BackwardOperands, ForwardOperands, Grads, OutLse, Pairs
from ..protocol.request import HALF, Capabilities
from ..protocol.scoring import Scoring, Tokens
from ..window.block_lists import BlocksMet, block_lists, intervals_in_part

NAME = "flex"
# No 64-bit indices: with torch 2.11, dk of rows of 2.5e9 elements was wrong on an H200.
CAPABILITIES = (
    Capabilities(
        device="cuda",
        dtypes=(*HALF, torch.float32),
        features=("softcap", "alibi", "window", "lse gradient", "deterministic"),
        widest=256,
        arch=(8, 0),
    ),
)

BLOCK = 128  # rows and keys of a block: FlexAttention's own default
LEAST_WIDTH = 16  # of q, k and v: what a matrix product of Triton takes
MOST_INTERVALS = 8  # of keys that a row may have in one call; the kernel tests each
VARIANTS = 64  # of compiled code: lengths turn symbolic, scorings and dtypes do not


def missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    return None


def forward(
    given: ForwardOperands, pairs: Pairs, scoring: Scoring, tokens: Tokens | None
) -> OutLse:
    merged = Accumulator()
    for mask in _masks(pairs, given.q.device):
        with torch.no_grad():
            merged.add(*_attend(given, mask, scoring, tokens))
    return merged.result(given.q, given.v.shape[-1], given.q.dtype)


def backward(
    given: BackwardOperands, pairs: Pairs, scoring: Scoring, tokens: Tokens | None, **_: bool
) -> Grads:
    """Always bitwise the same: each gradient is summed by one program in a fixed order."""
    inputs = given.q, given.k, given.v
    sums = [Sum(t) for t in inputs]
    for mask in _masks(pairs, given.q.device):
        with autograd_on():
            leaves = ForwardOperands(*(t.detach().requires_grad_() for t in inputs))
            part = _attend(leaves, mask, scoring, tokens)
            along = _gradients_of_part(given, *(t.detach() for t in part))
            found = torch.autograd.grad(part, leaves, along)
        for total, gradient in zip(sums, found, strict=True):
            total.add(gradient)
    dq, dk, dv = (total.result() for total in sums)
    return dq, dk, dv


def _gradients_of_part(given: BackwardOperands, part: Tensor, part_lse: Tensor) -> OutLse:
    """The gradients (g, c) of a part's out and lse; see the top of the file."""
    lse = given.lse
    weight = torch.exp(part_lse - lse).masked_fill(part_lse == -torch.inf, 0.0)
    wide = given.dout.to(lse.dtype)
    change = (wide * (part.to(lse.dtype) - given.out)).sum(-1).transpose(1, 2)
    if given.dlse is not None:
        change = change + given.dlse
    g = wide * weight.transpose(1, 2).unsqueeze(-1)
    return g.to(part.dtype), (weight * change).to(part_lse.dtype)


def _attend(given: ForwardOperands, mask: Any, scoring: Scoring, tokens: Tokens | None) -> OutLse:
    """out [b, i, h, e] and lse [b, h, i] of one call, differentiable."""
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v = given
    wide_enough = (_at_least(t, LEAST_WIDTH).transpose(1, 2) for t in given)
    # More variants than this are an error, never a silent dense attention. Each scale and softcap
    # is a variant too: torch's GPU kernels take no such inputs.
    with torch._dynamo.config.patch(recompile_limit=VARIANTS, specialize_float=True):
        out, aux = _compiled()(
            *wide_enough,
            score_mod=_score_mod(scoring, tokens, q),
            block_mask=mask,
            scale=scoring.softmax_scale,
            enable_gqa=q.shape[2] != k.shape[2],
            return_aux=AuxRequest(lse=True),
            # Not the kernel for few rows, which knows other shapes.
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )
    return out.transpose(1, 2)[..., : v.shape[-1]], aux.lse


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)


def _masks(pairs: Pairs, device: torch.device) -> list[Any]:
    """The BlockMask of each call."""

    def make() -> list[Any]:
        groups = _grouped(pairs.slices, pairs) if len(pairs.slices) else []
        return [_block_mask(*group, pairs, device) for group in groups]

    return pairs.made((NAME, device), make)


def _grouped(slices: Slices, pairs: Pairs) -> list[tuple[BlocksMet, BlocksMet, np.ndarray]]:
    """Split ``slices`` into as many calls as it takes for no row to have too many intervals in one:
    the block lists and the intervals of each call."""
    # Lengths are rounded up to whole blocks. Blocks that the ends of q and k cut short are then
    # partial, as in lists that torch makes.
    rows, keys = (-(-length // BLOCK) * BLOCK for length in (pairs.q_len, pairs.k_len))
    sides = block_lists(slices, rows, keys, BLOCK, BLOCK)
    found = intervals_in_part(slices, pairs.q_len, sides[0], BLOCK, BLOCK, MOST_INTERVALS)
    if found is not None:
        return [(*sides, found)]
    by_key = slices[slices[:, K0].argsort(kind="stable")]
    half = len(by_key) // 2
    return [*_grouped(by_key[:half], pairs), *_grouped(by_key[half:], pairs)]


def _block_mask(
    by_rows: BlocksMet,
    by_keys: BlocksMet,
    intervals: np.ndarray,
    pairs: Pairs,
    device: torch.device,
) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    def on_device(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(device)

    def lists_on_device(of: str, side: BlocksMet) -> dict[str, Any]:
        # Filled up with zeros to one width: torch 2.11 walks both by the strides of the first.
        width = max(x.indices.shape[1] for x in (side.partial, side.full))
        partial, full = (
            np.pad(x.indices, ((0, 0), (0, width - x.indices.shape[1])))
            for x in (side.partial, side.full)
        )
        lists = {
            f"{of}_num_blocks": side.partial.counts,
            f"{of}_indices": partial,
            f"full_{of}_num_blocks": side.full.counts,
            f"full_{of}_indices": full,
        }
        return {name: on_device(x)[None, None] for name, x in lists.items()}

    count = intervals.shape[1]
    spare = (1 << (count - 1).bit_length()) - count  # few counts, so few variants of the code
    intervals = np.pad(intervals, ((0, 0), (0, spare), (0, 0))).transpose(1, 2, 0)
    # Each is a tensor of its own: code compiled for one mask may assume that it is aligned.
    bounds = [(on_device(start.copy()), on_device(stop.copy())) for start, stop in intervals]
    return BlockMask(
        seq_lengths=(pairs.q_len, pairs.k_len),
        **lists_on_device("kv", by_rows),
        **lists_on_device("q", by_keys),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=_mask_mod(bounds),
    )


def _mask_mod(intervals: list[tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Whether row i attends key j: whether j is in one of the row's intervals, each int32[rows]."""

    def attends(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        (start, stop), *more = intervals
        inside = (start[i] <= j) & (j < stop[i])
        for start, stop in more:
            inside = inside | ((start[i] <= j) & (j < stop[i]))
        return inside

    return attends


def _score_mod(scoring: Scoring, tokens: Tokens | None, q: Tensor) -> Callable[..., Tensor] | None:
    """What is done to a score q.k * scale, or None."""
    softcap = scoring.softcap

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    if scoring.alibi_slopes is None:
        return capped if softcap else None
    assert tokens is not None
    slopes = scoring.alibi_slopes.to(accumulation_dtype(q.dtype)).expand(len(q), -1)
    rows, positions = tokens.rows, tokens.key_positions

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        return score - slopes[b, h] * (rows[i] - positions[j]).abs()

    return biased


def _at_least(t: Tensor, width: int) -> Tensor:
    """``t`` with zeros up to ``width``: they change neither scores nor the columns that stay."""
    short = width - t.shape[-1]
    return torch.nn.functional.pad(t, (0, short)) if short > 0 else t
