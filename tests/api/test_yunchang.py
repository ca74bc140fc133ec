"""The modules of yunchang over this package's attention, against dense attention."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from dense import assert_same
from op_cases import check_dense, expected
from rank_groups import Groups, comms, device_of, rows_of, whole
from ranks import Pool, worlds
from usp_cases import UspCase, as_there, compiled, tokens_there
from verdicts import check as check_ranks

from customized_ops.ring_attention import AttnMask, run_ranks
from customized_ops.ring_attention.api import yunchang
from customized_ops.ring_attention.api.yunchang import (
    EXTRACT_FUNC_DICT,
    LongContextAttention,
    set_seq_parallel_pg,
)
from customized_ops.ring_attention.api.yunchang import degrees as sequence_parallel
from customized_ops.ring_attention.api.yunchang.degrees import SequenceParallel
from customized_ops.ring_attention.core.comm.inprocess import InProcessComm
from customized_ops.ring_attention.core.comm.pending import Pending
from customized_ops.ring_attention.core.cost import H200
from customized_ops.ring_attention.op import bound

DEGREES = [(1, 1), (2, 1), (1, 2), (3, 1), (4, 1), (2, 2), (1, 4), (2, 3), (3, 2), (2, 4), (4, 2)]


def check(case: UspCase) -> None:
    check_dense(case, case.ud * case.rd)


# ------------------------------------------------------------------------------ where tokens lie


@pytest.mark.covering(1)
@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize(("ud", "rd"), DEGREES)
@pytest.mark.parametrize("impl", EXTRACT_FUNC_DICT)
def test_tokens_lie_as_there(impl: str, ud: int, rd: int, low: bool) -> None:
    total, ranks = 4 * ud * rd, ud * rd
    value = torch.arange(2 * total * 3).view(2, total, 3)
    for rank in range(ranks):
        more = {"use_ulysses_low": low} if impl == "zigzag" else {}
        got = EXTRACT_FUNC_DICT[impl](value, rank, ranks, rd=rd, ud=ud, **more)
        assert torch.equal(got, value[:, tokens_there(impl, total, rank, ud, rd, low)])
        assert got.is_contiguous() and got.data_ptr() != value.data_ptr()
        turned = EXTRACT_FUNC_DICT[impl](value.transpose(1, 2), rank, ranks, rd, ud, 2, **more)
        assert torch.equal(turned, got.transpose(1, 2))


def test_the_names_are_those_there() -> None:
    basic = ("basic", "basic_pytorch", "basic_flashinfer", "basic_npu")
    assert set(EXTRACT_FUNC_DICT) == {"strip", "zigzag", *basic}
    value = torch.arange(10.0).view(1, 10).requires_grad_()
    parts = [EXTRACT_FUNC_DICT["basic"](value, rank, 4) for rank in range(4)]
    assert [part.tolist() for part in parts] == [part.tolist() for part in value.chunk(4, 1)]
    assert not parts[0].requires_grad  # as there
    assert yunchang.zigzag_extract_local(value, 0, 1, 1, 1).requires_grad
    assert pickle.loads(pickle.dumps(EXTRACT_FUNC_DICT)) == EXTRACT_FUNC_DICT  # for data loaders
    assert yunchang.stripe_extract_local(value, 5, 2, 2, 1).tolist() == value[:, 1::2].tolist()


def test_the_extracts_know_what_was_said_last(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.arange(16).view(1, 16)
    extract = EXTRACT_FUNC_DICT["zigzag"]
    monkeypatch.setattr(sequence_parallel, "_default", [])
    assert extract(value, 1, 4, rd=2, ud=2).tolist() == [[12, 13, 14, 15]]
    said = run_ranks(4, lambda comm: SequenceParallel(2, 2, comm, use_ulysses_low=False))[0]
    sequence_parallel.set_default(said)
    assert extract(value, 1, 4, rd=2, ud=2).tolist() == [[4, 5, 6, 7]]
    assert extract(value, 1, 8, rd=4, ud=2).tolist() == [[14, 15]]  # of others nothing was said


# ------------------------------------------------------------------------------------ attention

MODULES = ("LongContextAttention", "LongContextAttentionQKVPacked", "AsyncLongContextAttention")
WHAT: dict[str, Any] = {
    "causal": dict(heads=(6, 3)),
    "full": dict(heads=(4, 4), causal=False, batch=2),
    "window": dict(heads=(4, 2), window=(7, 0)),
    "softcap": dict(heads=(5, 5), softcap=1.5, dims=(8, 6)),
    "one key head": dict(heads=(5, 1), alibi=True, dropout=0.2),
    "documents": dict(op="varlen", heads=(8, 2), cu_seqlens=(0, 5, 5, 40, 48)),
    "uneven documents": dict(op="varlen", heads=(4, 4), cu_seqlens=(0, 9, 37), length=37),
    "prefix": dict(op="masked", heads=(4, 2), given=AttnMask.prefix_lm(48, 9)),
    "uneven": dict(heads=(7, 7), length=41),
}


def case_of(what: str, **given: Any) -> UspCase:
    return UspCase(**{"op": "ring", "length": 48, **WHAT[what], **given})


IMPLS = ("basic", "zigzag", "strip")


@pytest.mark.thin(8)
@pytest.mark.parametrize(("ud", "rd"), [(2, 1), (1, 2), (2, 2), (4, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("what", WHAT)
def test_equals_dense(what: str, ud: int, rd: int) -> None:
    for impl in IMPLS:
        check(case_of(what, ud=ud, rd=rd, impl=impl))


@pytest.mark.parametrize("module", MODULES[1:])
@pytest.mark.parametrize("what", ["causal", "full", "one key head", "documents"])
def test_the_other_modules(what: str, module: str) -> None:
    dims = (8, 8)  # one tensor has one width
    for impl in IMPLS:
        check(case_of(what, ud=2, rd=2, impl=impl, module=module, dims=dims))


@pytest.mark.covering(1)
@pytest.mark.parametrize("ud", [1, 3, 4])
@pytest.mark.parametrize("what", WHAT)
def test_ulysses(what: str, ud: int) -> None:
    check(case_of(what, ud=ud, module="UlyssesAttention"))


@pytest.mark.parametrize("impl", ["basic", "zigzag", "strip"])
def test_rings_of_neighbours(impl: str) -> None:
    check(case_of("causal", ud=2, rd=3, impl=impl, low=False))


@pytest.mark.parametrize(
    ("module", "low", "sizes"),
    [
        ("LongContextAttention", True, {2}),
        ("LongContextAttention", False, {1, 2, 4}),  # whatever is the fastest
        ("AsyncLongContextAttention", True, {1, 2, 4}),
    ],
)
def test_the_ulysses_degree_is_the_size_of_teams(
    module: str, low: bool, sizes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, ran = bound.attention_forward, []

    def recorded(plan: Any, *args: Any) -> Any:
        ran.append(plan.team_size)
        return forward(plan, *args)

    monkeypatch.setattr(bound, "attention_forward", recorded)
    check(case_of("full", ud=2, rd=2, module=module, low=low))
    assert len(ran) == 4 and set(ran) <= sizes


class Noting:
    """A kernel that notes when it is called."""

    def __init__(self, kernel: Any, events: list[str]) -> None:
        self._kernel, self._events = kernel, events

    def __getattr__(self, name: str) -> Any:
        if name in ("forward", "backward"):
            self._events.append("attend")
        return getattr(self._kernel, name)


def test_keys_travel_while_others_are_attended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward and in the backward, where calls and links take as long as attending."""
    passes: list[list[str]] = []  # of rank 0
    fetch = InProcessComm.fetch

    def asked(comm: Any, *args: Any) -> Pending:
        pending = fetch(comm, *args)
        if comm.rank:
            return pending
        events = passes[-1]
        events.append("ask")
        return Pending(lambda: (events.append("arrive"), pending.wait())[1])

    def noting(run: Any) -> Any:
        def noted(plan: Any, comm: Any, kernel: Any, *args: Any, **options: Any) -> Any:
            if comm.rank == 0:
                passes.append([])
                kernel = Noting(kernel, passes[-1])
            return run(plan, comm, kernel, *args, **options)

        return noted

    for name in ("attention_forward", "attention_backward"):
        monkeypatch.setattr(bound, name, noting(getattr(bound, name)))
    monkeypatch.setattr(InProcessComm, "fetch", asked)
    slow_links = replace(H200, call_seconds=0.0, step_seconds=0.0, link_bytes=1e9)
    monkeypatch.setattr(InProcessComm, "costs", slow_links)
    check(case_of("causal", ud=1, rd=2, impl="zigzag", module="AsyncLongContextAttention"))
    assert len(passes) == 2
    for events in passes:
        first = [events.index(event) for event in ("ask", "attend", "arrive")]
        assert first == sorted(first) and events.count("attend") > 1, events


def test_lengths_of_q_and_k_may_differ() -> None:
    q, k = torch.randn(1, 16, 4, 8), torch.randn(1, 24, 4, 8)
    mask = AttnMask.causal(16, 24)

    def body(comm: Any) -> torch.Tensor:
        module = LongContextAttention(
            ring_impl_type="zigzag", parallel=SequenceParallel(2, 2, comm)
        )
        mine = (EXTRACT_FUNC_DICT["zigzag"](t, comm.rank, 4, rd=2, ud=2) for t in (q, k, k))
        return module(*mine, mask=mask, window_size=[-1, -1])

    layout = sequence_parallel.layout_of("zigzag", 16, 2, 2, True)
    alone = LongContextAttention(parallel=SequenceParallel(1, 1))(q, k, k, mask=mask)
    assert_same("out", layout.unshard(run_ranks(4, body)), alone, 1e-5)


def test_a_module_remembers_its_own() -> None:
    """And copies and travels, as it holds no communicator."""
    said = set_seq_parallel_pg(1, 1, 0, 1)
    first = LongContextAttention(ring_impl_type="zigzag")
    assert first.parallel is said
    sequence_parallel.set_default(SequenceParallel(1, 1, use_ulysses_low=False))
    assert first.parallel is said
    assert LongContextAttention().parallel is not said
    again = pickle.loads(pickle.dumps(first))
    assert again.parallel == said
    q = torch.randn(1, 8, 2, 4)
    assert torch.equal(again(q, q, q, causal=True), first(q, q, q, causal=True))
    assert not list(first.state_dict())


# ------------------------------------------------------------------------------------ real ranks


def pairs(size: int) -> list[tuple[int, int]]:
    return [(n, size // n) for n in range(1, size + 1) if size % n == 0]


def cases_over(size: int) -> dict[str, UspCase]:
    """Every module and layout, over all degrees of so many ranks."""
    cases = {}
    for ud, rd in pairs(size):
        for n, what in enumerate(("causal", "documents", "window")):
            impl = ("basic", "zigzag", "strip")[(n + ud) % 3]
            heads = (16, 4) if what == "causal" else (8, 2)
            given = dict(ud=ud, rd=rd, impl=impl, heads=heads, module=MODULES[n])
            cases[f"{what} {ud} x {rd}"] = case_of(what, **given)
    return cases | {"ulysses": case_of("full", heads=(8, 2), ud=size, module="UlyssesAttention")}


@worlds(cpus=[2, 4], gpus=[2, 4])
def test_over_process_groups(ranks: Pool) -> None:
    cases = {
        name: replace(c, device=device_of(ranks)) for name, c in cases_over(ranks.size).items()
    }
    ways = [Groups(whole(ranks.size), comm) for comm in ("ranks", *comms(ranks))]
    assert not check_ranks(ranks, [cases], ways)


@worlds(cpus=[2], gpus=[2, 4])
def test_in_bf16(ranks: Pool) -> None:
    low = dict(dtype=torch.bfloat16, device=device_of(ranks), dims=(64, 64), heads=(8, 2))
    cases = {name: replace(c, **low) for name, c in cases_over(ranks.size).items()}
    assert not check_ranks(ranks, [cases], [Groups(whole(ranks.size), comms(ranks)[-1])])


@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("impl", ["basic", "zigzag", "strip"])
@worlds(cpus=[2, 4], gpus=[2, 4])
def test_programs_as_they_are_there(ranks: Pool, impl: str, low: bool) -> None:
    """On 4 ranks Ulysses in a ring; on more than the degrees make, copies side by side."""
    cut = [(2, 1)] if ranks.size == 2 else [(2, 2), (2, 1)]
    for ud, rd in cut:
        case = case_of("causal", heads=(8, 4), ud=ud, rd=rd, impl=impl, low=low)
        replies = ranks.run(as_there, replace(case, device=device_of(ranks)))
        wanted = expected(case)
        for row in rows_of(ranks.size, ud * rd):
            for n, there in enumerate((case, replace(case, ud=rd, rd=ud))):
                layout = there.layout_of(ud * rd)
                for m, name in enumerate(("out", "dq", "dk", "dv")):
                    got = layout.unshard([replies[rank][n][m] for rank in row])
                    assert_same(f"{name} of {row}, model {n}", got, wanted[m + (m > 0)])


@worlds(cpus=[2], gpus=[2])
def test_a_compiled_model(ranks: Pool) -> None:
    case = case_of("causal", ud=1, rd=2, impl="zigzag", device=device_of(ranks))
    assert_same("out", case.layout_of(2).unshard(ranks.run(compiled, case)), expected(case)[0])
