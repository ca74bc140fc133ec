"""FlexAttention as a kernel: on CPU through stand-ins, on a GPU as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dense import assert_same, dense_attention
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slice_strategy import grids_of_bands
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from customized_ops.ring_attention.core.kernels import (
    BackwardOperands,
    ForwardOperands,
    Pairs,
    Scoring,
)
from customized_ops.ring_attention.core.kernels.adapters import flex
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.mask.slices import Slices, to_dense
from tests.kernels.small_cases import SCALE, for_dense, pairs_of, tokens_of

from .flex_cases import MASKS, draw, over_masks, over_scorings


def in_blocks(counts: Tensor, indices: Tensor, width: int, others: int) -> Tensor:
    """bool[blocks, others] of lists [1, 1, blocks] and [1, 1, blocks, most], which are read with
    ``width`` indices for each block, whatever they have."""
    assert indices.is_contiguous()
    found = torch.zeros(counts.shape[2], others, dtype=torch.bool)
    for block, count in enumerate(counts[0, 0].tolist()):
        found[block, indices.flatten()[block * width :][:count].long()] = True
        assert found[block].sum() == count, "a block is listed twice, or the list has an end"
    return found


def blocks_of(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """The partial and the full blocks, bool[row blocks, key blocks], as torch 2.11 reads them: it
    takes the width of a partial list for that of the full one too."""
    rows, keys = mask.kv_num_blocks.shape[2], mask.q_num_blocks.shape[2]
    assert mask.kv_indices is not None and mask.q_indices is not None
    by_rows, by_keys = mask.kv_indices.shape[3], mask.q_indices.shape[3]
    partial = in_blocks(mask.kv_num_blocks, mask.kv_indices, by_rows, keys)
    full = in_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, by_rows, keys)
    assert torch.equal(in_blocks(mask.q_num_blocks, mask.q_indices, by_keys, rows), partial.T)
    assert torch.equal(
        in_blocks(mask.full_q_num_blocks, mask.full_q_indices, by_keys, rows), full.T
    )
    return partial, full


def dense_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> tuple[Tensor, AuxOutput]:
    """What flex_attention computes on a GPU, and from what: only blocks that are listed, the mask
    function only in partial ones. With gradients, which the real one lacks on CPU."""
    assert block_mask is not None and scale is not None and return_aux == AuxRequest(lse=True)
    assert enable_gqa == (query.shape[1] != key.shape[1]) and not return_lse
    assert min(query.shape[-1], value.shape[-1]) >= flex.LEAST_WIDTH
    assert block_mask.seq_lengths == (query.shape[2], key.shape[2])
    b, h, rows, _ = query.shape
    partial, full = blocks_of(block_mask)
    assert not (partial & full).any()
    i, j = torch.arange(rows)[:, None], torch.arange(key.shape[2])
    where = i // block_mask.BLOCK_SIZE[0], j // block_mask.BLOCK_SIZE[1]
    allowed = (partial[where] & block_mask.mask_mod(None, None, i, j)) | full[where]
    key, value = (t.repeat_interleave(h // t.shape[1], dim=1) for t in (key, value))
    scores = torch.einsum("bhid,bhjd->bhij", query, key) * scale
    if score_mod is not None:
        places = torch.arange(b)[:, None, None, None], torch.arange(h)[:, None, None], i, j
        scores = score_mod(scores, *places)
    unattended = ~allowed.any(-1)
    scores = scores.masked_fill(~(allowed | unattended[:, None]), -torch.inf)
    out = torch.einsum("bhij,bhje->bhie", torch.softmax(scores, -1) * allowed, value)
    lse = torch.logsumexp(scores, -1).masked_fill(unattended, -torch.inf)
    return out, AuxOutput(lse=lse)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex, "_compiled", lambda: dense_flex)
    yield


@pytest.mark.covering(1)
@over_masks
@over_scorings
@pytest.mark.usefixtures("stand_in")
def test_forward(mask: AttnMask, scoring: Scoring) -> None:
    q, k, v, _, _ = draw(mask, 8, 20)
    tokens = tokens_of(mask.q_len, mask.k_len)
    want = dense_attention(q, k, v, mask, SCALE, **for_dense(scoring, tokens))
    out, lse = flex.forward(ForwardOperands(q, k, v), pairs_of(mask), scoring, tokens)
    assert_same("out", out, want[0])
    assert_same("lse", lse, want[1])


@pytest.mark.covering(1)
@over_masks
@over_scorings
@pytest.mark.parametrize("widths", [(8, 8), (20, 12)])
@pytest.mark.parametrize("lse_gradient", [False, True])
@pytest.mark.usefixtures("stand_in")
def test_backward_of_a_part_of_the_keys(
    mask: AttnMask, scoring: Scoring, widths: tuple[int, int], lse_gradient: bool
) -> None:
    """Of the final out and lse over these keys, some others and a sink."""
    more = AttnMask.full(mask.q_len, 9).restrict((0, mask.q_len - 1))
    both = AttnMask.from_slices(
        np.concatenate([mask.slices, more.shift(0, mask.k_len, k_len=mask.k_len + 9).slices]),
        mask.q_len,
        mask.k_len + 9,
    )
    q, k, v, dout, dlse = draw(both, *widths)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    tokens = tokens_of(both.q_len, both.k_len)
    out, lse = dense_attention(*leaves, both, SCALE, sink=sink, **for_dense(scoring, tokens))
    down = (dout, dlse if lse_gradient else torch.zeros_like(dlse))
    want_dq, *want = torch.autograd.grad((out, lse), leaves, down)
    q, k, v, out, lse = (t.detach() for t in (q, k, v, out, lse))
    got_dq = torch.zeros_like(q)
    for where, part in ((slice(0, mask.k_len), mask), (slice(mask.k_len, None), more)):
        asked = dlse if lse_gradient else None
        dq, *got = flex.backward(
            BackwardOperands(dout, q, k[:, where], v[:, where], out, lse, asked),
            pairs_of(part),
            scoring,
            tokens.part(slice(None), where),
        )
        got_dq += dq
        for name, mine, whole in zip(("dk", "dv"), got, want, strict=True):
            assert_same(name, mine, whole[:, where])
    assert_same("dq", got_dq, want_dq)


def test_rows_of_many_intervals_take_several_calls() -> None:
    masks = flex._masks(pairs_of(MASKS["stripes"]), torch.device("cpu"))
    assert len(masks) == 4  # of 21 intervals
    assert len(flex._masks(pairs_of(MASKS["causal"]), torch.device("cpu"))) == 1


@given(grids_of_bands(40, 40), st.integers(1, 12))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_blocks_are_those_that_torch_would_list(drawn: tuple[Slices, int, int], block: int) -> None:
    """Where its ``create_block_mask`` is given the mask: a block that the ends of q or k cut short
    is never full."""
    slices, rows, keys = drawn
    pairs = Pairs(slices, rows, keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK", block)
        groups = flex._grouped(slices, pairs)
        assume(len(groups) == 1)
        mask = flex._block_mask(*groups[0], pairs, torch.device("cpu"))
    dense = torch.from_numpy(to_dense(slices, rows, keys))
    padded = torch.nn.functional.pad(dense, (0, -keys % block, 0, -rows % block))
    in_block = padded.unfold(0, block, block).unfold(1, block, block).sum((2, 3))
    partial, full = blocks_of(mask)
    assert torch.equal(partial, (in_block > 0) & (in_block < block**2))
    assert torch.equal(full, in_block == block**2)
    assert mask.kv_indices is not None and mask.full_kv_indices is not None
    assert mask.kv_indices.stride() == mask.full_kv_indices.stride()


def test_bounds_are_tensors_of_their_own() -> None:
    """Of odd lengths, views would begin at addresses of another alignment."""
    pairs = pairs_of(AttnMask.varlen([0, 100, 101, 251], causal=True))
    (mask,) = flex._masks(pairs, torch.device("cpu"))
    (bounds,) = (cell.cell_contents for cell in mask.mask_mod.__closure__)
    for bound in (x for interval in bounds for x in interval):
        assert bound.storage_offset() == 0 and bound.is_contiguous()
        assert bound.untyped_storage().nbytes() == 4 * pairs.q_len
