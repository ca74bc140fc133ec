"""MagiAttention's names against dense attention."""

from __future__ import annotations

from dataclasses import replace

import magi_jobs
import numpy as np
import pytest
import torch
from dense import assert_same
from magi_jobs import named
from op_cases import NAMES, same
from ranks import Pool, worlds
from torch import Tensor

from customized_ops.ring_attention import AttnMask, run_ranks
from customized_ops.ring_attention.api import magi_attention as magi
from customized_ops.ring_attention.op.arguments import ArgumentError

CASES = named()


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("name", CASES)
def test_equals_dense(name: str, ranks: int) -> None:
    want = magi_jobs.dense(CASES[name])
    assert all(t[t.isfinite()].abs().max() > 1e-3 for t in want)
    for got in run_ranks(ranks, lambda comm: magi_jobs.cut(CASES[name], comm)):
        same(got, want)


@pytest.mark.parametrize("name", CASES)
def test_flex_flash_attn_func(name: str) -> None:
    same(magi_jobs.one(CASES[name]), magi_jobs.dense(CASES[name]))


@worlds(cpus=[2], gpus=[2])
def test_processes(ranks: Pool) -> None:
    for name in ("window", "inverse, padded"):
        for got in ranks.run(magi_jobs.in_world, CASES[name]):
            same(got, magi_jobs.dense(CASES[name]))


@pytest.mark.slow
@worlds(cpus=[4], gpus=[4])
def test_axes_of_a_mesh(ranks: Pool) -> None:
    case = CASES["documents"]
    want = magi_jobs.dense(case)
    for got in ranks.run(magi_jobs.on_a_mesh, case, (2, 2)):
        same(got[:5], want)
        same(got[5:], want)


@worlds(gpus=[2])
def test_bf16(ranks: Pool) -> None:
    """No further from fp64 than twice one GPU is, and rounding."""
    for case in named(512, dtype=torch.bfloat16, width=64).values():
        case = replace(case, heads=(4, 2))
        exact = magi_jobs.dense(case)
        alone, *_ = ranks.run(magi_jobs.one, case)
        cut, *_ = ranks.run(magi_jobs.in_world, case)
        for name, truth, a, b in zip(NAMES, exact, alone, cut, strict=False):
            seen = truth.isfinite()
            one, many = ((t.double() - truth)[seen].abs().max() for t in (a, b))
            rounding = torch.finfo(b.dtype).eps * truth[seen].abs().max()
            assert many <= 2 * one + rounding, (name, one, many)


def test_one_dispatch_for_several_masks() -> None:
    causal = CASES["causal"]
    window = replace(causal, q_ranges=((0, 5), (5, 40)), k_ranges=((0, 5), (1, 40)))
    window = replace(window, types=("causal", "bi_causal"))

    def both(comm) -> tuple[Tensor, Tensor, Tensor]:
        key = causal.key(comm)
        other = magi.make_flex_key_for_new_mask_after_dispatch(
            window.q_ranges, window.k_ranges, list(window.types), key
        )
        packed = magi.make_varlen_key_for_new_mask_after_dispatch(
            torch.tensor([0, 11, 40]), [0, 11, 40], key, window_size=(3, 0)
        )
        assert magi.get_most_recent_key(comm) == packed
        q, k, v = (magi.dispatch(t, key) for t in causal.tensors()[:3])
        keys = (key, other, packed)
        return tuple(magi.undispatch(magi.calc_attn(q, k, v, one)[0], key) for one in keys)

    packed = AttnMask.varlen([0, 11, 40], window=(3, 0))
    q, k, v = (t.unsqueeze(0) for t in causal.tensors()[:3])
    masks = (causal.mask, window.mask, packed)
    want = [magi_jobs.dense_attention(q, k, v, mask, 8**-0.5)[0][0] for mask in masks]
    for got in run_ranks(3, both):
        for mask, a, b in zip(masks, got, want, strict=True):
            assert_same(str(mask), a, b)


def test_keys_are_values() -> None:
    case = CASES["window"]
    first, second = case.key(None), case.key(None)
    assert first == second
    assert hash(first) == hash(second)
    assert first.layout is second.layout
    assert first != CASES["causal"].key(None)
    assert len({first, second, replace(case, chunk=5).key(None)}) == 2


@pytest.mark.parametrize("shift", [-1, 3, 41])
@pytest.mark.parametrize("name", ["documents", "inverse, padded"])
def test_roll_and_positions(name: str, shift: int) -> None:
    case = CASES[name]
    x = torch.randn(40, 3, dtype=torch.float64)
    whole = torch.cat([x, x.new_full((case.pad, 3), -1.0)])

    def rank(comm) -> tuple[Tensor, Tensor, Tensor]:
        key = case.key(comm)
        mine = magi.dispatch(x, key, pad_value=-1.0)
        assert len(mine) == key.layout.sizes[comm.rank]
        rolled = magi.roll(mine, shift, 0, key)
        assert torch.equal(rolled, magi.roll_simple(mine, shift, 0, key))
        return rolled, mine, magi.get_position_ids(key, "cpu")

    key = replace(case).key(None)
    shards = run_ranks(4, rank)
    layout = run_ranks(4, lambda comm: case.key(comm).layout)[0]
    assert torch.equal(layout.unshard([s[0] for s in shards], 0), whole.roll(shift, 0))
    for rank_, (_, mine, positions) in enumerate(shards):
        assert torch.equal(positions, torch.from_numpy(layout.positions(rank_)).clamp(max=39))
        assert torch.equal(mine[positions < 39], x[positions[positions < 39]])
    assert key.total_seqlen_q == 40 + case.pad


def test_gradients_of_a_gathered_tensor() -> None:
    """The same on every rank, or, if said, added up over the ranks."""
    case = CASES["full, chunks"]

    def rank(comm) -> list[Tensor]:
        key = case.key(comm)
        x = torch.ones(key.layout.sizes[comm.rank], dtype=torch.float64, requires_grad=True)
        grads = []
        for partial in (False, True):
            whole = magi.undispatch(x, key, is_partial_grad=partial)
            weight = torch.arange(40.0, dtype=torch.float64) * (comm.rank + 1 if partial else 1)
            grads += torch.autograd.grad(whole @ weight, x)
        return [*grads, magi.get_position_ids(key, "cpu").double()]

    for same_, added, positions in run_ranks(3, rank):
        assert torch.equal(same_, positions)
        assert torch.equal(added, positions * 6)


def test_chunks_are_kept_together() -> None:
    key = run_ranks(4, lambda comm: replace(CASES["causal"], chunk=5).key(comm))[0]
    for own in key.layout.ranges:
        assert all(start % 5 == 0 and stop % 5 == 0 for start, stop in own)
    area = [sum(p + 1 for p in key.layout.positions(rank)) for rank in range(4)]
    assert max(area) <= 1.01 * np.mean(area)


@pytest.mark.parametrize(
    ("causal", "window", "first"),
    [
        (False, (-1, -1), 0),
        (True, (-1, -1), 0),
        (False, (3, 0), 0),
        (False, (2, 4), 0),
        (False, (-1, 2), 0),
        (False, (3, 0), 2),
    ],
)
def test_documents_as_ranges(causal: bool, window: tuple[int, int], first: int) -> None:
    cu_q, cu_k = torch.tensor([0, 6, 6, 20, 23]), [0, 4, 9, 23, 31]
    given = magi.infer_attn_mask_from_cu_seqlens(cu_q, cu_k, causal, window, first)
    side = (window[0], -1) if window[1] == 0 else window
    closed = causal or window[1] == 0
    want = AttnMask.varlen(cu_q.tolist(), cu_k, causal=closed, window=side, global_tokens=first)
    got = magi_jobs.AttnMask.from_ranges(*given[:2], [kind.value for kind in given[2]], *given[3:])
    assert np.array_equal(got.to_dense(), want.to_dense())
    assert want.area > 0
    alone = magi.infer_attn_mask_from_sliding_window(magi.AttnRange(6, 20), (9, 23), window)
    one = AttnMask.from_ranges(*alone[:2], [kind.value for kind in alone[2]], 20, 23)
    assert np.array_equal(one.to_dense()[6:, 9:], AttnMask.dense(14, window=window).to_dense())


def test_ranges() -> None:
    ranges = magi.AttnRanges.from_cu_seqlens([2, 5, 9], 9)
    assert ranges == magi.AttnRanges.from_ranges([[2, 5], (5, 9)])
    assert (ranges.start, ranges.end, ranges.size, ranges.total_seqlen) == (2, 9, 2, 7)
    assert ranges.to_tensor().tolist() == [[2, 5], [5, 9]]
    assert ranges[1].seqlen == 4
    for kind in magi.AttnMaskType:
        assert magi.AttnMaskType.from_int_type(kind.to_int_type()) is kind
    with pytest.raises(ArgumentError, match="cu_seqlens ends at 9, seq_len is 8"):
        magi.AttnRanges.from_cu_seqlens([2, 5, 9], 8)


def test_a_batch_as_documents() -> None:
    cu, _ = magi.infer_varlen_mask_from_batch(3, 5, "cpu")
    key = magi.magi_attn_varlen_key(cu, cu, 2, 1, 4, causal=True)
    assert key.mask == AttnMask.varlen([0, 5, 10, 15], causal=True)
    x = torch.randn(3, 5, 2)
    local, same_key = magi.magi_attn_varlen_dispatch(
        magi.squash_batch_dim(x), cu, cu, 2, 1, 4, causal=True
    )
    assert same_key == key
    assert torch.equal(local, x.reshape(15, 2))
