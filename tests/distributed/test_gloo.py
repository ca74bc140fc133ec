"""The attention ops on real processes over gloo."""

from __future__ import annotations

import op_jobs
import pytest
import torch
from dense import assert_same
from op_cases import Case, expected, gather
from op_table import TABLE, UNEVEN
from ranks import JobFailed, Pool

from customized_ops.ring_attention import wrap_ring_attn_func


def check(pool: Pool, cases: dict[str, Case], members: tuple[int, ...], as_group: bool) -> None:
    replies = pool.run(op_jobs.run_cases, list(cases.values()), members, as_group)
    per_rank = [reply for reply in replies if reply is not None]
    assert len(per_rank) == len(members)
    assert_expected(cases, per_rank)


def assert_expected(cases: dict[str, Case], per_rank: list[list[list[torch.Tensor]]]) -> None:
    for n, (name, case) in enumerate(cases.items()):
        want = expected(case)
        got = gather(case, [rank[n] for rank in per_rank])
        for m, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(f"{name}, result {m}", a, b)


def test_two_ranks(two_ranks: Pool) -> None:
    check(two_ranks, {**TABLE, **UNEVEN[2]}, (0, 1), as_group=False)


def test_four_ranks(four_ranks: Pool) -> None:
    check(four_ranks, {**TABLE, **UNEVEN[4]}, (0, 1, 2, 3), as_group=False)


@pytest.mark.parametrize("team_size", [2, 4])
def test_heads_in_uneven_shares(four_ranks: Pool, team_size: int) -> None:
    cases = {
        "uneven": Case("ring", 26, heads=(6, 3), batch=2),
        "one key head": Case("ring", 26, heads=(5, 1), alibi=True, dropout=0.3, sink=True),
        "five": Case("varlen", heads=(5, 5), cu_seqlens=(0, 7, 26, 41), length=41),
    }
    assert_expected(cases, four_ranks.run(op_jobs.run_in_teams, list(cases.values()), team_size))


@pytest.mark.parametrize("members", [(1, 2), (0, 2), (1, 2, 3)])
@pytest.mark.parametrize("as_group", [False, True], ids=["ranks", "ProcessGroup"])
def test_groups_that_are_not_the_world(
    four_ranks: Pool, members: tuple[int, ...], as_group: bool
) -> None:
    names = ("causal", "zigzag odd, grouped", "packed grouped")
    check(four_ranks, {name: TABLE[name] for name in names}, members, as_group)


@pytest.mark.parametrize("late", range(4))
def test_two_groups_side_by_side(four_ranks: Pool, late: int) -> None:
    """Data parallel x context parallel; no rank asks the others for anything."""
    case = TABLE["grouped 4:1"]
    replies = four_ranks.run(op_jobs.run_two_groups, case, late)
    for pair in (replies[:2], replies[2:]):
        for got, want in zip(gather(case, pair), expected(case), strict=True):
            assert_same("two groups", got, want)


@pytest.mark.parametrize(
    ("change", "own", "told"),
    [
        ("dtype", "do not agree", "do not agree"),
        ("shorter", "holds 15 tokens, but layout", "do not agree"),
        ("k heads", "q has 4 heads and k has 5", "q has 4 heads and k has 5"),
        ("window", "do not agree", "do not agree"),
        ("dropout", "dropout_p must be in [0, 1), got 1.5", "dropout_p must be in [0, 1), got 1.5"),
    ],
)
def test_one_wrong_rank_stops_all_and_the_next_call_works(
    two_ranks: Pool, change: str, own: str, told: str
) -> None:
    said = two_ranks.run(op_jobs.run_with_error, TABLE["causal"], 1, change)
    if change == "shorter":  # its own idea of the total is consistent: only comparing tells
        own = told
    assert own in said[1]
    assert told in said[0]
    check(two_ranks, {"causal": TABLE["causal"]}, (0, 1), as_group=False)


def test_a_rank_outside_the_group_is_told(two_ranks: Pool) -> None:
    with pytest.raises(JobFailed, match=r"global rank 0 is not in process_group=\(1, 2\)"):
        two_ranks.run(op_jobs.run_outside)


def test_a_group_travels_through_a_compiled_graph(two_ranks: Pool) -> None:
    q = torch.randn(1, 16, 4, 8, dtype=torch.float64)
    cut = torch.cat(two_ranks.run(op_jobs.compiled, q), 1)
    assert_same("compiled", cut, wrap_ring_attn_func(q, q, q) * 2)
