"""The attention ops on real processes over gloo."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import op_jobs
import packed_jobs
import pytest
import torch
from dense import assert_same
from op_table import TABLE, UNEVEN
from rank_groups import Groups, whole
from ranks import JobFailed, Pool, worlds
from verdicts import check

from customized_ops.ring_attention import wrap_ring_attn_func
from customized_ops.ring_attention.core.topology import Topology
from customized_ops.ring_attention.fuzz import Trial, processes
from customized_ops.ring_attention.fuzz.kinds import KINDS


@worlds(cpus=[2, 4], gpus=[])
def test_every_op(ranks: Pool) -> None:
    check(ranks, [{**TABLE, **UNEVEN[ranks.size]}], [Groups(whole(ranks.size), "ranks")])


@pytest.mark.slow
@worlds(cpus=[4], gpus=[])
def test_every_op_over_hosts(ranks: Pool) -> None:
    """As if on two hosts of two: what crosses does so once, and goes on inside."""
    check(ranks, [{**TABLE, **UNEVEN[ranks.size]}], [Groups(whole(ranks.size), "2,2")])


def test_a_call_of_each_family(two_ranks: Pool) -> None:
    """What is fuzzed over ranks that are threads, over processes."""
    random = Random(1)
    cases = [KINDS[kind](random, 2) for kind in KINDS for _ in range(3)]
    parts = two_ranks.run(op_jobs.run_cases, cases)
    for case, each in zip(cases, zip(*parts, strict=True), strict=True):
        assert not Trial(case, 2).difference(case.gather(each)), case


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
@pytest.mark.parametrize("job", [op_jobs.run_with_error, op_jobs.run_with_error_by_default])
def test_one_wrong_rank_stops_all_and_the_next_call_works(
    two_ranks: Pool, change: str, own: str, told: str, job: Callable[..., str]
) -> None:
    said = two_ranks.run(job, TABLE["causal"], 1, change)
    if change == "shorter":  # its own idea of the total is consistent: only comparing tells
        own = told
    assert own in said[1]
    assert told in said[0]
    check(two_ranks, [{"causal": TABLE["causal"]}], [Groups(whole(2), "ranks")])


def test_fake_tensors(two_ranks: Pool) -> None:
    assert two_ranks.run(op_jobs.on_fake_tensors) == [(1, 16, 2, 8)] * 2


def test_a_rank_outside_the_group_is_told(two_ranks: Pool) -> None:
    with pytest.raises(JobFailed, match=r"global rank 0 is not in process_group=\(1, 2\)"):
        two_ranks.run(op_jobs.run_outside)


def test_a_rank_that_failed_is_not_waited_for(
    two_ranks: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(processes.SECONDS_AFTER_A_FAILURE, "gloo", 0.1)
    with pytest.raises(JobFailed, match=r"(?s)rank 0:.*not today\n\nrank 1:\nno answer in time$"):
        two_ranks.run(op_jobs.one_fails, two_ranks.seconds)


def test_a_group_travels_through_a_compiled_graph(two_ranks: Pool) -> None:
    q = torch.randn(1, 16, 4, 8, dtype=torch.float64)
    cut = torch.cat(two_ranks.run(op_jobs.compiled, q), 1)
    assert_same("compiled", cut, wrap_ring_attn_func(q, q, q) * 2)


@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(10, 1000), marks=pytest.mark.slow)], ids=len
)
@pytest.mark.filterwarnings("ignore:Layout.balanced")
@worlds(cpus=[3, 4], gpus=[])
def test_random_packed_batches(ranks: Pool, seeds: range) -> None:
    """Also fewer documents, and fewer tokens, than ranks."""
    for start in range(seeds.start, seeds.stop, 50):  # a busy machine takes seconds for each
        some = range(start, min(start + 50, seeds.stop))
        for rank, error in enumerate(ranks.run(packed_jobs.random_batches, some)):
            assert error < 1e-10, f"rank {rank}, seeds {some}"


@pytest.mark.filterwarnings("ignore:Layout.balanced")
@worlds(cpus=[4], gpus=[])
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(8), marks=pytest.mark.slow)])
@pytest.mark.parametrize("hosts", ["2x2", "3,1", pytest.param("4x1", marks=pytest.mark.slow)])
def test_ranks_that_count_as_on_several_hosts(ranks: Pool, hosts: str, seeds: range) -> None:
    for rank, found in enumerate(ranks.run(packed_jobs.random_batches_in_steps, seeds, hosts)):
        error, stages, groups = found
        assert error < 1e-10, f"rank {rank}"
        assert stages > 2 and (groups > 1 or len(seeds) == 4)  # few batches may need none


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Layout.balanced")
@worlds(cpus=[6, 8], gpus=[])
def test_more_ranks_that_count_as_on_several_hosts(ranks: Pool) -> None:
    hosts = {6: "2x3", 8: "4x2"}[ranks.size]
    found = ranks.run(packed_jobs.random_batches_in_steps, range(6), hosts)
    assert max(error for error, *_ in found) < 1e-10


@worlds(cpus=[4, 8], gpus=[])
@pytest.mark.parametrize("held", [4, 0.5])
def test_rows_and_keys_move_over_slow_links(ranks: Pool, held: float) -> None:
    """On a grid of two blocks, at once or in steps."""
    rates = f"between_bytes=1e6,held_shards={held}"
    for error, plan in ranks.run(packed_jobs.on_a_grid, f"{ranks.size}x1", rates):
        assert error < 1e-10
        keys, rows = (each[:, 1].max() for each in (plan.kv_tokens(), plan.q_tokens()))
        shard = max(plan.q_layout.sizes)
        assert (ranks.size // 2 - 2) * shard < keys < ranks.size // 2 * shard
        assert shard <= rows < 2 * shard


@worlds(cpus=[4], gpus=[])
def test_hosts_of_another_world_are_refused(ranks: Pool) -> None:
    with pytest.raises(JobFailed, match=r"SEQSHARD_HOSTS=2x3 has 6 ranks, there are 4"):
        ranks.run(packed_jobs.random_batches, range(1), "2x3")


@worlds(cpus=[4], gpus=[])
def test_ranks_that_are_given_other_hosts_are_told(ranks: Pool) -> None:
    """Also where some are given none."""
    for given in (["2x2", "2x2", "4x1", "2x2"], ["2x2", "2x2", "", ""]):
        said = [f"SEQSHARD_HOSTS={text}" if text else "hosts=None" for text in given]
        firsts = ", ".join(f"rank {said.index(text)}: {text}" for text in sorted({*said}))
        error = f"the ranks of the group 'group' are given different hosts ({firsts})"
        assert ranks.run(packed_jobs.hosts_given, given) == [[error]] * 4


@worlds(cpus=[4], gpus=[])
def test_hosts_are_an_argument(ranks: Pool) -> None:
    """Which stands above the variable, at the first use of a group."""
    none, other = [""] * 4, ["4x1"] * 4
    late = "the group 'group' is used over {}; give hosts={} before its first use, host by host"
    want = ["2x2", "2x2", late.format("2x2", "4x1"), "2x2"]
    for variables in (none, other):
        found = ranks.run(packed_jobs.hosts_given, variables, "2x2", "2x2", "4x1", None)
        assert found == [want] * 4
    found = ranks.run(packed_jobs.hosts_given, other, "1x4", "2x2", None)
    assert found == [["None", late.format("1x4", "2x2"), "None"]] * 4
    found = ranks.run(packed_jobs.hosts_given, none, "3x2", None)
    assert found == [["hosts=3x2 has 6 ranks, there are 4", "None"]] * 4


@worlds(cpus=[4], gpus=[])
def test_hosts_are_found(ranks: Pool) -> None:
    found = ranks.run(packed_jobs.hosts_found, ["a", "a", "b", "b"])
    assert found == [(Topology((2, 2)), 4.0, [])] * 4


@worlds(cpus=[4], gpus=[])
def test_hosts_that_take_turns_are_told_once(ranks: Pool) -> None:
    """By the first rank."""
    (flat, _, (told,)), *others = ranks.run(packed_jobs.hosts_found, ["a", "b", "a", "b"])
    assert flat is None
    assert "its hosts take turns (a: ranks 0, 2; b: ranks 1, 3). Number the ranks" in told
    assert [(topology, messages) for topology, _, messages in others] == [(None, [])] * 3


@worlds(cpus=[4], gpus=[])
def test_given_hosts_that_tear_machines_are_told_once(ranks: Pool) -> None:
    """Machines that are parts of a host are not torn, nor is one that pretends to be several."""
    (hosts, _, (told,)), *_ = ranks.run(packed_jobs.hosts_found, ["a", "b", "a", "b"], "2x2")
    assert hosts == Topology((2, 2))
    assert "SEQSHARD_HOSTS=2x2 puts ranks 0, 2 of machine a on several hosts" in told
    for machines in (["a"] * 4, ["a", "b", "c", "d"]):
        found = ranks.run(packed_jobs.hosts_found, machines, "2x2")
        assert found == [(Topology((2, 2)), 4.0, [])] * 4
