"""The functions of ring_flash_attn against dense attention on one device."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace

import pytest
import torch
from op_cases import check_dense
from peer_cases import FAMILIES, TABLE
from rank_groups import Groups, comms, device_of, whole
from ranks import Pool, worlds
from refusals import refusals
from verdicts import check, on

from customized_ops.ring_attention import (
    run_ranks,
    wrap_ring_attn_varlen_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.api import ring_flash_attn as api

prepare = api.llama3_flash_attn_prepare_cu_seqlens


@pytest.mark.parametrize("name", TABLE)
def test_four_ranks(name: str) -> None:
    check_dense(TABLE[name], 4)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("function", FAMILIES)
def test_other_numbers_of_ranks(function: str, ranks: int) -> None:
    check_dense(TABLE[f"{function} kv"], ranks)


@worlds(cpus=[2, 4], gpus=[])
def test_real_ranks(ranks: Pool) -> None:
    cases = {name: TABLE[name] for name in TABLE if name.endswith(" kv")}
    assert not check(ranks, [cases], [Groups(whole(ranks.size), "ranks")])


@worlds(cpus=[4], gpus=[4])
def test_a_group_that_does_not_begin_at_rank_0(ranks: Pool) -> None:
    cases = on(device_of(ranks), {name: TABLE[name] for name in TABLE if name.endswith(" kv")})
    assert not check(ranks, [cases], [Groups(((1, 2),), comm) for comm in ("ranks", "nccl")])


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@worlds()
def test_gpus(ranks: Pool, dtype: str) -> None:
    cases = on("cuda", TABLE)
    if dtype == "bfloat16":
        made = {"dtype": torch.bfloat16, "dims": (64, 64)}
        cases = {name: replace(case, **made) for name, case in cases.items()}
    assert not check(ranks, [cases], [Groups(whole(ranks.size), comm) for comm in comms(ranks)])


def test_all_names_of_the_package() -> None:
    kinds = [
        f"{name}_{packs}func" for name in FAMILIES for packs in ("", "kvpacked_", "qkvpacked_")
    ]
    others = ["llama3_flash_attn_prepare_cu_seqlens"]
    others += ["substitute_hf_flash_attn", "update_ring_flash_attn_params"]
    assert sorted(api.__all__) == sorted(kinds + others)
    assert all(getattr(api, name).__name__ == name for name in api.__all__)


OPTIONS = dict(
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
)
DOCUMENTS = {
    "ring_flash_attn_varlen": ["cu_seqlens", "max_seqlen"],
    "zigzag_ring_flash_attn_varlen": ["cu_seqlens", "max_seqlen"],
    "llama3_flash_attn_varlen": [
        *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("heads_k_stride", "local_k_slice"),
    ],
}


@pytest.mark.parametrize("packs", ["", "kv", "qkv"])
@pytest.mark.parametrize("function", FAMILIES)
def test_signatures(function: str, packs: str) -> None:
    tensors = {"": ["q", "k", "v"], "kv": ["q", "kv"], "qkv": ["qkv"]}[packs]
    name = f"{function}_{packs}packed_func" if packs else f"{function}_func"
    parameters = inspect.signature(getattr(api, name)).parameters
    needed = tensors + DOCUMENTS.get(function, [])
    assert list(parameters) == needed + list(OPTIONS)
    assert all(parameters[each].default is inspect.Parameter.empty for each in needed)
    assert {each: parameters[each].default for each in OPTIONS} == OPTIONS


def test_only_out_by_default_and_positions_count() -> None:
    q, k = torch.randn(1, 8, 4, 4), torch.randn(1, 8, 2, 4)
    alone = api.zigzag_ring_flash_attn_func(q, k, k, 0.0, 0.3, True, (3, -1), group=[0])
    want = wrap_zigzag_attn_func(q, k, k, 0.3, 0.0, True, (3, -1))
    assert torch.equal(alone, want)
    kv = torch.stack([k, k], 2)
    assert torch.equal(
        api.zigzag_ring_flash_attn_kvpacked_func(q, kv, 0.0, 0.3, True, (3, -1), group=[0]), want
    )


def test_dropout_is_drawn_from_torchs_generator() -> None:
    q = torch.randn(12, 4, 4, dtype=torch.float64)
    cu = [0, 5, 12]
    told = prepare(cu, True, 0, 1)
    outs = []
    for p in (0.4, 0.4, 0.0):
        torch.manual_seed(3)
        outs.append(
            api.llama3_flash_attn_varlen_func(
                q, q, q, *told[:4], 4, told[4], p, causal=True, group=[0]
            )
        )
    torch.manual_seed(3)
    same = wrap_ring_attn_varlen_func(q, q, q, cu, cu, dropout_p=0.4, causal=True)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], same)
    assert not torch.allclose(outs[0], outs[2])


@pytest.mark.parametrize(
    ("causal", "rank", "want"),
    [
        (True, 0, ([0, 3, 4], [0, 3, 4], 3, 3, (0, 4))),
        (False, 0, ([0, 3, 4], [0, 3, 10], 3, 7, (0, 10))),
        (True, 1, ([0, 4], [0, 5], 4, 5, (3, 8))),
        (True, 2, ([0, 2, 4], [0, 7, 9], 2, 7, (3, 12))),
        (False, 2, ([0, 2, 4], [0, 7, 9], 2, 7, (3, 12))),
    ],
)
def test_prepared_documents(causal: bool, rank: int, want: tuple) -> None:
    cu = torch.tensor([0, 3, 10, 12], dtype=torch.int32)
    *made, where = prepare(cu, causal, rank, 3)
    assert [t.tolist() for t in made[:2]] == list(want[:2])
    assert made[0].dtype == made[1].dtype == torch.int32
    assert (*made[2:], (where.start, where.stop)) == want[2:]
    assert torch.equal(torch.arange(12)[where], torch.arange(*want[4]))


def test_prepared_documents_may_travel() -> None:
    *_, where = prepare([0, 3, 8], True, 1, 2)
    again = pickle.loads(pickle.dumps(where))
    assert again == where
    assert vars(again.step) == vars(where.step)


Q = torch.zeros(1, 6, 4, 4)
P = torch.zeros(6, 4, 4)
TOLD = prepare([0, 2, 6], True, 0, 1)


def llama3(*told: object, stride: int = 2, causal: bool = True) -> None:
    api.llama3_flash_attn_varlen_func(P, P, P, *told[:4], stride, told[4], causal=causal, group=[0])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: api.ring_flash_attn_func(Q, Q, Q), "group=None is the world, but"),
        (
            lambda: api.zigzag_ring_flash_attn_func(Q[:, :5], Q[:, :5], Q[:, :5], group=[0]),
            r"dim 1 of q must be even, got q of shape \(1, 5, 4, 4\)",
        ),
        (
            lambda: api.zigzag_ring_flash_attn_varlen_func(P, P, P, [0, 4, 4, 5, 6], 4, group=[0]),
            "document 2 has 1 tokens here",
        ),
        (
            lambda: api.ring_flash_attn_varlen_func(P, P, P, [0, 1, 6], 4, group=[0]),
            "max_seqlen=4, but the longest document has 5",
        ),
        (
            lambda: api.ring_flash_attn_varlen_func(P, P, P, [0, 7], 7, group=[0]),
            "ends at 7 but there are 6 tokens",
        ),
        (
            lambda: api.ring_flash_attn_kvpacked_func(Q, Q, group=[0]),
            r"dim -3 of kv must hold k, v, got kv of shape \(1, 6, 4, 4\)",
        ),
        (lambda: prepare([0, 5], True, 0, 2), "2 ranks do not hold equal parts of 5 tokens"),
        (lambda: prepare([0, 4], True, 2, 2), "rank=2 is none of world_size=2 ranks"),
        (lambda: llama3(*TOLD[:4], slice(0, 6)), r"got slice\(0, 6, None\)"),
        (lambda: llama3(*TOLD, causal=False), "causal=True, but this is rank 0 of 1, causal=False"),
        (lambda: llama3([0, 6], *TOLD[1:]), r"cu_seqlens_q must be \[0, 2, 6\]"),
        (lambda: llama3(*TOLD[:3], 3, TOLD[4]), "max_seqlen_k=3, but the longest"),
        (lambda: llama3(*TOLD, stride=3), "must divide the 4 key heads, got 3"),
    ],
)
def test_errors(call, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.usefixtures("unchecked")
def test_ranks_of_other_lengths_are_told() -> None:
    def rank(comm) -> None:
        q = torch.zeros(1, 4 + 2 * comm.rank, 2, 4)
        api.zigzag_ring_flash_attn_func(q, q, q, group=comm)

    with pytest.raises(ValueError, match=r"hold \[4, 6\] tokens"):
        run_ranks(2, rank)


@pytest.mark.usefixtures("unchecked")
def test_an_odd_length_on_one_rank_is_told_to_all() -> None:
    def rank(comm) -> None:
        q = torch.zeros(1, 4 + comm.rank, 2, 4)
        api.zigzag_ring_flash_attn_func(q, q, q, group=comm)

    assert all("[4, 5]" in said for said in refusals(2, rank))
