"""Tokens that a model shuffles itself: attention follows them, and what cannot is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from ranks import Pool

from annotations.errors import PartitionError
from on_nnscaler.models import shuffle_models
from on_nnscaler.models.attention_models import calls_of
from on_nnscaler.models.shuffle_models import cut_only, training
from on_nnscaler.support import autodist, jobs

pytestmark = pytest.mark.nnscaler


def test_equals_one_process(two_ranks: Pool) -> None:
    """Through norms, linears, views and residual adds; documents differ from step to step."""
    ranks = jobs.trained(two_ranks, training())
    for rank in ranks:
        assert all("layout_by_document(" in call for call in calls_of(rank.code))


def test_whole_keys(two_ranks: Pool) -> None:
    """q stays in the order, k and v are restored and gathered by the engine."""
    ranks = jobs.trained(two_ranks, training("whole keys"))
    for n, rank in enumerate(ranks):
        for call in calls_of(rank.code):
            assert f"q_rows=({n}, 2)" in call and "layout_by_document(" in call


def test_whole_keys_without_a_shuffle(two_ranks: Pool) -> None:
    """The rows of a part are then contiguous."""
    job = training(form="whole keys", policy=partial(cut_only, name="allgather"))
    ranks = jobs.trained(two_ranks, job)
    assert all("layout" not in call for rank in ranks for call in calls_of(rank.code))


@pytest.mark.parametrize(
    "form",
    [
        *("copied documents", "listed documents", "streaming", "tokens", "shapes"),
        *("uncut", "normalised as read", "shuffled labels", "short, not shown"),
    ],
)
def test_in_other_words(two_ranks: Pool, form: str) -> None:
    """Lengths that are copied or a list, one argument for the lengths of q and k, shuffled
    integers, which the next op takes for indices, shapes that are read, not known, ops that
    nnscaler does not cut, and a loss over tokens in that order."""
    jobs.trained(two_ranks, training(form))


@pytest.mark.parametrize("form", ["to zigzag", "to zigzag, rolled"])
def test_layouts_of_a_models_own(two_ranks: Pool, form: str) -> None:
    ranks = jobs.trained(two_ranks, training(form))
    for rank in ranks:
        assert all("layout_named('zigzag', 64, 2)" in call for call in calls_of(rank.code))


def test_four_ranks(four_ranks: Pool) -> None:
    jobs.trained(four_ranks, training(plan=4))


def test_a_shuffle_in_one_stage_and_its_partner_in_the_next(four_ranks: Pool) -> None:
    pipeline = {"pipeline_nmicros": 2, "pipeline_scheduler": "1f1b"}
    job = training(
        policy=shuffle_models.in_two_stages,
        plan=4,
        micro_batches=2,
        end2end=True,
        config={"pas_config": pipeline},
    )
    ranks = jobs.trained(four_ranks, job)
    for n, rank in enumerate(ranks):
        group = f"process_group={[0, 1] if n < 2 else [2, 3]}"
        for call in calls_of(rank.code):
            assert group in call and "layout_by_document(" in call
        shuffles = "wrap_maybe_shuffle(" in rank.code, "wrap_maybe_unshuffle(" in rank.code
        assert shuffles == (n < 2, n >= 2)


def test_shuffles_that_are_not_cut(two_ranks: Pool) -> None:
    """They are the identity, so attention that is cut is told nothing."""
    ranks = jobs.trained(two_ranks, training(policy=partial(cut_only, name="_attn")))
    for rank in ranks:
        calls = calls_of(rank.code)
        assert all("process_group=[0, 1]" in c and "layout" not in c for c in calls), calls


REFUSED = {
    "dense": "only attention over packed documents (cu_seqlens) takes that order",
    "other documents": "cu_seqlens_q is another tensor",
    "cumulative": "nnscaler does not cut it on its tokens: it may mix them or depend on",
    "unbound": "unbind in the module: nnscaler runs it as a Python function, without gradients",
    "by a generator": "iter in the module: nnscaler runs it as a Python function, without",
    "flipped": "flip in the module: nnscaler has no annotation for it",
    "of several results": "frexp in the module: nnscaler runs it as a Python function",
    "tokens as classes": "cross_entropy in the module: nnscaler does not cut it on its tokens",
    "natural by keyword": "atan2 in the module: nnscaler does not show how it goes along ",
    "natural, not shown": "added in the module: nnscaler does not show how it goes along tanh",
    "attention of a user's own": "it was registered with nnscaler with an emit_fn",
    "natural labels": "its operands have tokens in different orders",
    "shuffled whole keys": "it mixes tokens or depends on their places: ",
    "natural operand": "its operands have tokens in different orders",
    "returned inside": "the module returns tokens",
    "slopes": "alibi_slopes do not go with rows of a layout",
    "to zigzag, natural labels": "its operands have tokens in different orders",
}


@pytest.mark.parametrize("form", REFUSED)
def test_refused_by_name(tmp_path: Any, form: str) -> None:
    with pytest.raises(PartitionError) as raised:
        jobs.generate(training(form), tmp_path, ranks=2)
    said = str(raised.value)
    order = "zigzag" if form.startswith("to zigzag") else "zigzag by document"
    assert REFUSED[form] in said and order in said and "expected: " in said, said


def test_shuffled_labels_under_autodist(two_ranks: Pool, tmp_path: Any) -> None:
    """They are smaller than what a norm makes, and would be replicated for that."""
    job = training("shuffled labels", "cp", config={"pas_config": autodist.settings(tmp_path)})
    ranks = jobs.trained(two_ranks, job)
    for rank in ranks:
        assert all("layout_by_document(" in call for call in calls_of(rank.code))


def test_a_layout_of_ranks_is_refused(tmp_path: Any) -> None:
    with pytest.raises(
        ValueError, match="for the ranks of a group, but the call has no process_group"
    ):
        jobs.generate(training("to zigzag, own layout"), tmp_path, ranks=2)


def test_attention_that_is_not_cut_like_its_shuffle(tmp_path: Any) -> None:
    with pytest.raises(PartitionError, match="tokens are shuffled in 2 parts, and it is cut"):
        job = shuffle_models.training(policy=partial(cut_only, name="shuffle"))
        jobs.generate(job, tmp_path, ranks=2)
