"""Attention cut on heads, on the batch, and on several dims at once: who is grouped with whom."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from ranks import Pool

from annotations.errors import PartitionError
from on_nnscaler.models import attention_models as models
from on_nnscaler.models.attention_models import calls_of, groups_of, training
from on_nnscaler.support import jobs, policies

pytestmark = pytest.mark.nnscaler

PAIRS = [{(0, 1)}, {(0, 1)}, {(2, 3)}, {(2, 3)}]
ACROSS = [{(0, 2)}, {(1, 3)}, {(0, 2)}, {(1, 3)}]
ALONE = [{()}] * 4


def cut(attend: Any, *cuts: tuple[str, int], **further: Any) -> jobs.Training:
    devices = further.pop("devices", None)
    further["config"] = {"pas_config": {"max_partition_degree": cuts[0][1]}}
    policy = partial(policies.attention, cuts=list(cuts), devices=devices)
    return training(attend, policy, **further)


@pytest.mark.parametrize("attend", [models.ring_with_everything, models.varlen])
def test_key_heads(two_ranks: Pool, attend: Any) -> None:
    ranks = jobs.trained(two_ranks, cut(attend, ("g", 2), plan=2))
    assert [groups_of(rank.code) for rank in ranks] == ALONE[:2]


@pytest.mark.parametrize("attend", [models.ring_with_everything, models.varlen, models.masked])
def test_more_ranks_than_key_heads(four_ranks: Pool, attend: Any) -> None:
    """Each rank has one head of q and all heads of k and v."""
    ranks = jobs.trained(four_ranks, cut(attend, ("qh", 4), plan=4))
    for n, rank in enumerate(ranks):
        assert groups_of(rank.code) == {()}
        assert all(f"q_heads=({n}, 4)" in call for call in calls_of(rank.code))


def test_as_many_key_heads_as_query_heads(four_ranks: Pool) -> None:
    ranks = jobs.trained(four_ranks, cut(models.zigzag, ("h", 4), plan=4, kv_heads=models.HEADS))
    assert [groups_of(rank.code) for rank in ranks] == ALONE


def test_batch(two_ranks: Pool) -> None:
    ranks = jobs.trained(two_ranks, cut(models.ring_with_everything, ("b", 2), plan=2))
    assert [groups_of(rank.code) for rank in ranks] == ALONE[:2]


TWO_CUTS = [
    ([("g", 2), ("l", 2)], None, PAIRS),
    ([("l", 2), ("g", 2)], None, ACROSS),
    ([("g", 2), ("l", 2)], [0, 2, 1, 3], ACROSS),
    ([("l", 2), ("g", 2)], [0, 2, 1, 3], PAIRS),
    ([("l", 2), ("l", 2)], None, [{(0, 1, 2, 3)}] * 4),
    ([("l", 2), ("", 2)], None, ACROSS),
    ([("", 2), ("l", 2)], None, PAIRS),
    ([("", 2), ("l", 2)], [2, 3, 0, 1], PAIRS),
]
WITH_BATCH = [([("b", 2), ("l", 2)], None, PAIRS), ([("l", 2), ("b", 2)], None, ACROSS)]


@pytest.mark.parametrize(
    ("attend", "cuts", "devices", "groups"),
    [
        *((models.ring, *case) for case in TWO_CUTS + WITH_BATCH),
        *((models.varlen, *case) for case in TWO_CUTS),
    ],
)
def test_two_cuts(
    four_ranks: Pool,
    attend: Any,
    cuts: list[tuple[str, int]],
    devices: list[int] | None,
    groups: list[set[tuple[int, ...]]],
) -> None:
    """The group is of the ranks that differ in their tokens alone."""
    ranks = jobs.trained(four_ranks, cut(attend, *cuts, plan=4, devices=devices))
    assert [groups_of(rank.code) for rank in ranks] == groups


def test_rows_and_heads(four_ranks: Pool) -> None:
    """k and v are whole in both dims, so nothing moves inside."""
    ranks = jobs.trained(four_ranks, cut(models.ring_by_rows, ("lq", 2), ("g", 2), plan=4))
    for n, rank in enumerate(ranks):
        assert groups_of(rank.code) == {()}
        assert all(f"q_rows=({n // 2}, 2)" in call for call in calls_of(rank.code))


@pytest.mark.parametrize(
    "devices", [[0, 1, 2, 3], [0, 2, 1, 3]], ids=lambda devices: "".join(map(str, devices))
)
@pytest.mark.parametrize("cuts", [[("l", 2), ("", 2)], [("g", 2), ("", 2)]], ids=["l", "g"])
def test_copies_of_parts(four_ranks: Pool, cuts: list[tuple[str, int]], devices: list[int]) -> None:
    """The n-th copies of all parts go together."""
    jobs.trained(four_ranks, cut(models.ring, *cuts, plan=4, devices=devices))


@pytest.mark.parametrize(
    ("cuts", "devices", "lying"),
    [
        ([("l", 2)], [1, 0], "[[1], [0]]"),
        ([("g", 2), ("l", 2)], [1, 0, 2, 3], "[[1], [0]]"),
        ([("l", 2), ("", 2)], [2, 0, 1, 3], "[[2, 0], [1, 3]]"),
        ([("", 2), ("l", 2)], [0, 3, 2, 1], "[[0, 2], [3, 1]]"),
    ],
)
def test_parts_out_of_order(
    tmp_path: Any, cuts: list[tuple[str, int]], devices: list[int], lying: str
) -> None:
    job = cut(models.ring, *cuts, plan=len(devices), devices=devices)
    with pytest.raises(PartitionError) as raised:
        jobs.generate(job, tmp_path, ranks=len(devices))
    assert str(raised.value) == (
        "customized_ops.ring_attention.ring_attn.wrap_ring_attn_func: the 2 parts of 'l' lie on "
        f"devices {lying}; an op that communicates inside needs each part on as many devices, in "
        "increasing order"
    )


SWAPPED = [
    (
        models.ring,
        [("b", 2), ("l", 2)],
        [0, 3, 1, 2],
        "'b' lie on devices [[[0], [1]], [[3], [2]]]",
    ),
    (
        models.ring,
        [("b", 2), ("l", 2)],
        [1, 2, 0, 3],
        "'b' lie on devices [[[1], [0]], [[2], [3]]]",
    ),
    (
        models.ring,
        [("l", 2), ("b", 2)],
        [0, 1, 3, 2],
        "'b' lie on devices [[[0], [1]], [[3], [2]]]",
    ),
    (models.varlen, [("g", 2), ("l", 2)], [0, 3, 1, 2], "'g' lie on devices"),
    (models.ring, [("g", 2), ("b", 2)], [0, 3, 1, 2], "'g' lie on devices"),
    (models.ring_by_rows, [("lq", 2), ("g", 2)], [0, 3, 1, 2], "'lq' lie on devices"),
    (models.ring_by_rows, [("lq", 4)], [0, 2, 1, 3], "'lq' lie on devices"),
    (models.ring, [("qh", 4)], [0, 2, 1, 3], "'qh' lie on devices"),
    (
        models.ring_by_rows,
        [("", 2), ("lq", 2)],
        [0, 3, 2, 1],
        "'lq' lie on devices [[[0, 2], [3, 1]]",
    ),
    (models.ring, [("", 2), ("g", 2)], [1, 2, 3, 0], "'g' lie on devices [[[1, 3], [2, 0]]"),
    # All rows are permuted alike: results would be permuted back, but each part has the parameters
    # (sinks, slopes) of its own heads.
    (models.ring, [("g", 2), ("l", 2)], [2, 3, 0, 1], "'g' lie on devices [[[2], [0]], [[3], [1]]"),
    (models.varlen, [("g", 2), ("l", 2)], [2, 3, 0, 1], "'g' lie on devices"),
    (models.ring, [("g", 2), ("l", 2)], [3, 2, 0, 1], "'g' lie on devices [[[3], [0]], [[2], [1]]"),
    (models.packed_window, [("l", 2), ("g", 2)], [1, 0, 3, 2], "'g' lie on devices"),
    (models.ring_with_everything, [("h", 4)], [3, 2, 1, 0], "'h' lie on devices"),
]


@pytest.mark.parametrize(("attend", "cuts", "devices", "lying"), SWAPPED)
def test_parts_that_adapters_would_swap(
    tmp_path: Any, attend: Any, cuts: list[tuple[str, int]], devices: list[int], lying: str
) -> None:
    """Our groups would be right, but nnscaler's gathers go by rank."""
    heads = {"kv_heads": models.HEADS} if ("h", 4) in cuts else {}
    job = cut(attend, *cuts, plan=4, devices=devices, **heads)
    with pytest.raises(PartitionError) as raised:
        jobs.generate(job, tmp_path, ranks=4)
    said = str(raised.value)
    assert lying in said and "nnscaler's adapters would swap" in said, said


@pytest.mark.parametrize("other", ["b", "l"])
def test_a_parameter_that_is_part_cut_part_copied(tmp_path: Any, other: str) -> None:
    """Sinks are cut with the heads, and each part of them is read on both parts of the batch."""
    for cuts in ([("g", 2), (other, 2)], [(other, 2), ("g", 2)]):
        with pytest.raises(PartitionError) as raised:
            jobs.generate(cut(models.ring_with_everything, *cuts, plan=4), tmp_path, ranks=4)
        said = str(raised.value)
        assert said.startswith("wrap_ring_attn_func: a call in layers.0 is cut so that the"), said
        assert "sink (4,) is in 2 parts, each read by 2 parts of the call" in said, said


def test_a_weight_that_is_part_cut_part_copied(tmp_path: Any) -> None:
    """A linear's columns and its batch: two parts of the weight, each read by two parts."""
    policy = partial(policies.attention, cuts=[("n", 2), ("a", 2)], name="linear")
    with pytest.raises(PartitionError, match=r"linear: .* is in 2 parts, each read by 2 parts"):
        jobs.generate(training(models.ring, policy, plan=4), tmp_path, ranks=4)


def test_a_parameter_that_is_cut_and_its_call_copied(four_ranks: Pool) -> None:
    """Copies of a part have whole gradients, which nnscaler need not add up."""
    jobs.trained(four_ranks, cut(models.ring_with_everything, ("g", 2), ("", 2), plan=4))
