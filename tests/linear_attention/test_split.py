"""Recurrent layers over real ranks: gloo, DTensor and the embedded engine's policies."""

from __future__ import annotations

from typing import Any

import pytest
import recurrent_jobs
from ranks import Pool, worlds
from recurrent_jobs import Answer

from annotations.engines.torch import Link, Rates


def same(alone: Answer, found: Answer) -> None:
    assert alone.keys() == found.keys()
    for name, expected in alone.items():
        error = (found[name] - expected).abs().max().item()
        assert error < 1e-10, f"{name} is off by {error:.1e}"


@worlds(cpus=[2, 4], gpus=[2, 4])
def test_random_cases(ranks: Pool) -> None:
    assert ranks.run(recurrent_jobs.of_cases, list(range(12)), None) == [[]] * ranks.size


@pytest.mark.slow
@worlds(cpus=[1, 3, 5, 6, 7, 8], gpus=[8])
def test_random_cases_over_other_numbers_of_ranks(ranks: Pool) -> None:
    assert ranks.run(recurrent_jobs.of_cases, list(range(12)), None) == [[]] * ranks.size


@pytest.mark.slow
@worlds(cpus=[4], gpus=[4])
def test_a_group_that_does_not_begin_at_rank_0(ranks: Pool) -> None:
    assert ranks.run(recurrent_jobs.of_cases, list(range(12)), (1, 2, 3)) == [[]] * 4


@worlds(cpus=[2], gpus=[2])
def test_ranks_that_disagree(ranks: Pool) -> None:
    for changed, said in (
        ({"heads": (2, 4)}, "DisagreementError"),
        ({"tokens": 10}, "DisagreementError"),
    ):
        for answer in ranks.run(recurrent_jobs.refused, changed, 1):
            assert answer.startswith(said)


PACKED = (5, 1, 9, 9)


@pytest.mark.parametrize(
    ("policy", "layers", "lengths", "options", "split", "lowered"),
    [
        ("cp", "da", PACKED, {}, "wrap_gated_delta_rule_func  1      l / 2", True),
        ("cp", "ga", (), {"hoist": True}, "layout: zigzag over 24 tokens, permuted once at", False),
        ({"wrap_gated_*": "l", "wrap_causal_conv1d_func": "d"}, "g", (), {}, "d / 2", False),
        *(
            pytest.param(policy, "dag", lengths, options, said, True, marks=pytest.mark.slow)
            for policy, lengths, options, said in (
                ("cp", PACKED, {}, "wrap_gated_delta_rule_func   1      l / 2"),
                ("cp", (), {"hoist": True}, "layout: zigzag over 24 tokens, permuted once at: "),
                ("cp", (), {}, "wrap_causal_conv1d_func      2      l / 2"),
                ("cp", PACKED, {"hoist": True}, "permuted once at"),
                ("ulysses", (), {}, "wrap_gated_linear_attn_func  1      g / 2"),
                ("dp", (), {}, "wrap_gated_linear_attn_func  1      b / 2"),
                ("auto", PACKED, {}, "wrap_gated_delta_rule_func"),
            )
        ),
    ],
)
@worlds(cpus=[2], gpus=[2])
def test_parallelized(
    ranks: Pool,
    policy: Any,
    layers: str,
    lengths: tuple[int, ...],
    options: dict[str, Any],
    split: str,
    lowered: bool,
) -> None:
    """Models of the layers in question; all of them in one, lowered, behind ``slow``."""
    given = policy, layers, 1 if lengths else 2, lengths, options, lowered
    for alone, found, plan in ranks.run(recurrent_jobs.parallelized, *given):
        same(alone, found)
        assert split in plan


# Attention is slow, so that it is put in another order; bytes are few and rounds cost nothing, so
# that a change of order between layers is cheaper than longer chains.
SLOW_ATTENTION = Rates(
    attention_flops_per_second=1e6, memory_bytes_per_second=1e12, links=(Link(0.0, 1e7),)
)


@pytest.mark.parametrize(
    ("layers", "lengths", "moves", "lowered"),
    [
        pytest.param("dad", (), 2, False, marks=pytest.mark.slow),
        pytest.param("dad", PACKED, 2, True, marks=pytest.mark.slow),
        pytest.param("dadad", (), 4, True, marks=pytest.mark.slow),
    ],
)
@worlds(cpus=[4], gpus=[4])
def test_layers_in_two_orders(
    ranks: Pool, layers: str, lengths: tuple[int, ...], moves: int, lowered: bool
) -> None:
    """Attention in an order that gives its ranks even work, the recurrent layers in that of the
    sequence: tokens move between them, once for each change. (Over two ranks one order is as good
    for both.)"""
    options = {"rates": SLOW_ATTENTION, "hoist": True}
    given = "cp", layers, 1 if lengths else 2, lengths, options, lowered
    for alone, found, plan in ranks.run(recurrent_jobs.parallelized, *given):
        same(alone, found)
        rows = [line.split() for line in plan.splitlines() if line.startswith("to_order")]
        assert sum(int(row[1]) for row in rows) == moves, plan
        assert all(row[2:5] == ["l", "/", str(ranks.size)] for row in rows)


@pytest.mark.slow
@worlds(cpus=[4], gpus=[4])
def test_layers_in_two_orders_of_any_total(ranks: Pool) -> None:
    """Of packed documents, by each batch's own lengths: a graph for the first total, then one."""
    lengths = [PACKED, (9, 15), (20, 12), (1, 2, 33)]
    options = {"rates": SLOW_ATTENTION, "hoist": True}
    for answers, graphs in ranks.run(recurrent_jobs.of_other_totals, "dad", lengths, options):
        for alone, found in answers:
            same(alone, found)
        assert graphs == 2


@worlds(cpus=[2], gpus=[2])
def test_sizes_that_depend_on_documents_are_not_compiled(ranks: Pool) -> None:
    """All ranks refuse it."""
    for said in ranks.run(recurrent_jobs.compiled, "cp", PACKED, True):
        assert "compile=True, but sizes inside wrap_gated_delta_rule_func depend" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "hoist"),
    [("cp", False), ({"wrap_ring*": "l", "wrap_gated*": "g", "wrap_causal*": "d"}, True)],
)
@worlds(cpus=[2], gpus=[2])
def test_packed_documents_are_compiled(ranks: Pool, policy: Any, hoist: bool) -> None:
    """In natural order, and where linear attention is cut on heads."""
    for alone, found in ranks.run(recurrent_jobs.compiled, policy, PACKED, hoist):
        same(alone, found)


@pytest.mark.slow
@worlds(cpus=[2], gpus=[])
def test_the_calls_that_do_not_wait(ranks: Pool) -> None:
    """On CPUs nobody waits: so the test for GPUs is tested."""
    assert ranks.run(recurrent_jobs.calls_without_waiting, 2) == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cp", "ulysses", "dp"])
@worlds(cpus=[2], gpus=[2])
def test_on_dtensors(ranks: Pool, policy: str) -> None:
    for alone, found, _ in ranks.run(recurrent_jobs.parallelized, policy, "dag", 2, (), {}, False):
        same(alone, found)
