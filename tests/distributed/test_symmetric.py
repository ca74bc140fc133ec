"""GPUs that write into one another's memory: what they compute is what messages give, in a CUDA
graph too, and they neither wait for the host nor take more memory from step to step."""

from __future__ import annotations

from typing import Any

import document_jobs
import pytest
import symmetric_jobs as jobs
import torch
from op_cases import Case
from rank_groups import Rows, columns_of, comms, rows_of, whole
from ranks import Pool, worlds

from customized_ops.ring_attention import AttnMask
from customized_ops.ring_attention.core.kernels.adapters import flash4

pytestmark = pytest.mark.gpu

TOKENS = 8192  # a rank; from here on keys come in a stage of their own, and causal rows move
# One number of heads and one width, those of test_kernels, so that libraries compile little.
ALIKE: dict[str, Any] = {
    "heads": (8, 2),
    "dims": (64, 64),
    "dtype": torch.bfloat16,
    "device": "cuda",
}


def cases(*names: str, ranks: int) -> dict[str, Case]:
    """All cases over so many ranks, or those named."""
    n = TOKENS * ranks
    made = {
        "zigzag": Case("ring", n, layout="zigzag", **ALIKE),
        "rows move": Case("ring", n, **ALIKE),
        "packed": Case("varlen", n, cu_seqlens=(0, n // 10, 3 * n // 4, n), **ALIKE),
        "window": Case("window", n, window=(2048, -1), **ALIKE),
        "masked": Case("masked", n, given=AttnMask.prefix_lm(n, n // 4), **ALIKE),
        "scattered": Case("streaming", n, window=(500, -1), sink_tokens=16, **ALIKE),
        "fused, batch 2": Case("ring", n // 2, batch=2, fused=True, layout="zigzag", **ALIKE),
    }
    return {name: made[name] for name in names or made}


def case(name: str, ranks: Pool) -> Case:
    """One of them."""
    return cases(name, ranks=ranks.size)[name]


# Where rows move results are wider than keys, and never come over them.
EACH_WAY = [("zigzag", ""), ("rows move", ""), ("zigzag", jobs.SPARING), ("window", jobs.SPARING)]
WAYS = pytest.mark.parametrize(("name", "purpose"), EACH_WAY)


@pytest.fixture(autouse=True)
def in_reach(ranks: Pool) -> None:
    """Ranks that do not reach each other's memory are of no use here."""
    if "symmetric" not in comms(ranks):
        pytest.skip("the GPUs do not reach each other's memory")


def right(ranks: Pool) -> list[list[str]]:
    """Nothing wrong on any rank."""
    return [[]] * ranks.size


@worlds()
def test_results_are_those_of_messages(ranks: Pool) -> None:
    of_all = cases(ranks=ranks.size)
    assert ranks.run(jobs.against_messages, of_all, whole(ranks.size)) == right(ranks)


@worlds()
def test_layers_that_follow_one_another(ranks: Pool) -> None:
    fused = case("fused, batch 2", ranks)
    assert ranks.run(jobs.layer_on_layer, fused, whole(ranks.size)) == right(ranks)


@pytest.mark.parametrize(
    ("name", "purpose"),
    [*EACH_WAY, ("packed", ""), ("scattered", "")],  # these read tables of indices
)
@worlds()
def test_a_step_in_a_cuda_graph(ranks: Pool, name: str, purpose: str) -> None:
    assert ranks.run(jobs.captured, case(name, ranks), whole(ranks.size), purpose) == right(ranks)


@worlds()
def test_no_step_makes_the_host_wait(ranks: Pool) -> None:
    some = cases("zigzag", "rows move", "packed", "scattered", ranks=ranks.size)
    assert ranks.run(jobs.without_waiting, some, whole(ranks.size)) == right(ranks)


@WAYS
@worlds()
def test_whoever_is_late(ranks: Pool, name: str, purpose: str) -> None:
    given = case(name, ranks), whole(ranks.size), max(6, ranks.size), purpose
    assert ranks.run(jobs.one_late, *given) == right(ranks)


@pytest.mark.skipif(flash4.missing() is not None, reason="flash-attn-4 alone is replayed")
@WAYS
@worlds()
def test_steps_that_are_replayed(ranks: Pool, name: str, purpose: str) -> None:
    assert ranks.run(jobs.replayed, case(name, ranks), whole(ranks.size), purpose) == right(ranks)


@pytest.mark.skipif(flash4.missing() is not None, reason="flash-attn-4 alone is replayed")
@worlds()
def test_one_tape_does_for_other_documents(ranks: Pool) -> None:
    given = Case("varlen", TOKENS // 4 * ranks.size, cu_seqlens=(0,), **ALIKE), whole(ranks.size)
    assert ranks.run(document_jobs.new_documents, *given, 40) == right(ranks)


@pytest.mark.skipif(flash4.missing() is not None, reason="flash-attn-4 alone is replayed")
@pytest.mark.parametrize("name", ["zigzag", "rows move", "packed", "scattered"])
@worlds()
def test_messages_that_are_sent_anew(ranks: Pool, name: str) -> None:
    given = case(name, ranks), whole(ranks.size), "messages", "nccl"
    assert ranks.run(jobs.replayed, *given) == right(ranks)


@pytest.mark.skipif(flash4.missing() is not None, reason="flash-attn-4 alone is replayed")
@pytest.mark.parametrize("name", ["zigzag", "packed"])
@worlds(gpus=[4])
def test_messages_between_hosts_that_are_sent_anew(ranks: Pool, name: str) -> None:
    given = case(name, ranks), whole(ranks.size), "hosts", "2,2"
    assert ranks.run(jobs.replayed, *given) == right(ranks)


def halves(size: int) -> list[Rows]:
    """Groups of half of the ranks each, at the same time: neighbours, and every second one."""
    return [rows_of(size, size // 2), columns_of(size, 2)]


@pytest.mark.parametrize("which", [0, 1])
@worlds(gpus=[4, 8])
def test_two_groups_at_once(ranks: Pool, which: int) -> None:
    """Of which each has one memory, whose passes overlap those of the other."""
    rows, of_all = halves(ranks.size)[which], cases(ranks=ranks.size // 2)
    assert ranks.run(jobs.against_messages, of_all, rows) == right(ranks)
    assert ranks.run(jobs.captured, of_all["rows move"], rows) == right(ranks)
    assert ranks.run(jobs.one_late, of_all["zigzag"], rows, len(rows[0]) + 1) == right(ranks)


@worlds()
def test_memory_stays_the_same_from_step_to_step(ranks: Pool) -> None:
    """However many layers a step has; the second step makes one piece of what the first took."""
    given = case("rows move", ranks), whole(ranks.size), (1, 1, 1, 3, 3, 1)
    for after in ranks.run(jobs.memory_of_steps, *given):
        _, (_, pieces) = after[1]
        assert len(pieces) == 1 and pieces[0][1] > 0
        assert after[1:] == [after[1]] * 5


@worlds()
def test_results_may_come_over_keys(ranks: Pool) -> None:
    """One piece of memory holds the keys, and then what their attention gives back."""
    given = case("zigzag", ranks), whole(ranks.size), (1, 1)
    taken = []
    for purpose in ("a place for each", f"one place, {jobs.SPARING}"):
        _, (_, (_, pieces)) = ranks.run(jobs.memory_of_steps, *given, purpose)[0]
        taken.append(sum(size for _, size in pieces))
    assert taken[0] == 2 * taken[1] > 0


@worlds()
def test_plans_share_their_memory(ranks: Pool) -> None:
    zigzag = case("zigzag", ranks)
    lengths = (zigzag.length // 2, zigzag.length // 4, zigzag.length)
    given = zigzag, whole(ranks.size), lengths, 3
    for first, *others in ranks.run(jobs.memory_of_plans, *given):
        _, pieces = others[0][0]
        assert len(pieces) == 1
        assert others == [[others[0][0]] * 3] * 2
        # The first round took what is now one piece.
        assert sum(size for _, size in first[-1][1]) == pieces[0][1]
