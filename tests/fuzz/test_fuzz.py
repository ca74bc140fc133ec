"""The fuzzer draws everything, finds what is planted, and makes it small."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

import customized_ops.ring_attention as ring_attention
from customized_ops import causal_conv1d, chunk_linear_cross_entropy, linear_attention
from customized_ops.causal_conv1d import op as convolution_op
from customized_ops.chunk_linear_cross_entropy import loss as loss_module
from customized_ops.linear_attention import op as linear_op
from customized_ops.linear_attention import parts
from customized_ops.ring_attention import AttnMask, Layout, layout_ops, zigzag_allgather_attn_varlen
from customized_ops.ring_attention import fuzz as fuzzer
from customized_ops.ring_attention.fuzz import Case, LossCase, Trial, draw
from customized_ops.ring_attention.fuzz.kinds import KINDS, attention_draws, masks
from customized_ops.ring_attention.fuzz.shrink import kind_of, shrunk
from customized_ops.ring_attention.rollouts import packed

from .fuzz_cases import spoilt

MADE_OTHERWISE = {"dense", "from_slices", "shift", "restrict"}  # by other ops, or in "union"
NAMES = {"torch": torch, "AttnMask": AttnMask, **vars(fuzzer)}


def test_every_constructor_of_masks_is_drawn() -> None:
    makers = {
        name
        for name, member in inspect.getmembers(AttnMask, callable)
        if not name.startswith("_")
        and inspect.signature(member).return_annotation in ("AttnMask", "Self")
    }
    assert makers - MADE_OTHERWISE == set(masks.MASKS)


def test_every_public_function_is_drawn() -> None:
    functions = {
        name
        for package in (ring_attention, causal_conv1d, linear_attention, chunk_linear_cross_entropy)
        for name in package.__all__
        if name.startswith(("wrap_", "chunk_"))
    }
    written = "".join(inspect.getsource(inspect.getmodule(draws)) for draws in KINDS.values())
    written += inspect.getsource(inspect.getmodule(Case))
    assert len(functions) >= 18 and {name for name in functions if name not in written} == set()


def test_a_seed_draws_the_same_trials_and_all_kinds_of_them() -> None:
    first, second = Random(3), Random(3)
    trials = [draw.trial(first) for _ in range(250)]
    assert [str(one) for one in trials] == [str(draw.trial(second)) for _ in range(250)]
    assert {one.ranks for one in trials} == {*range(1, draw.MOST_RANKS + 1)}
    cases = [one.case for one in trials]
    assert {case.op for case in cases if isinstance(case, Case)} == set(attention_draws.CASES)
    assert len({type(case) for case in cases}) == len(KINDS) == len(draw.SHARES)
    for kind in {type(case) for case in cases}:
        assert [case for case in cases if isinstance(case, kind) and case.layout]
    layouts = {case.layout.partition(":")[0] for case in cases if case.layout}
    assert layouts >= {"contiguous", "zigzag", "striped", "sizes", "ranges", "chunks"}


def test_a_layer_comes_after_49_calls_and_changes_none_of_them() -> None:
    trials, alone = list(islice(draw.trials(7, ["moves", "loss"]), 150)), Random(7)
    assert [n for n, one in enumerate(trials) if one.policy] == [49, 99, 149]
    assert {one.ranks for one in trials if one.policy} == {draw.LAYER_RANKS}
    calls = [str(one) for one in trials if not one.policy]
    assert calls == [str(draw.trial(alone, ["moves", "loss"])) for _ in range(147)]
    assert not any(one.policy for one in islice(draw.trials(7, ["moves"]), 60))


def test_a_trial_prints_as_the_expression_that_makes_it() -> None:
    random = Random(4)
    for _ in range(80):
        one = draw.trial(random)
        assert eval(str(one), NAMES) == one


def found_and_shrunk(kinds: Sequence[str], condition: Callable[[Any], bool]) -> tuple[Trial, str]:
    """The first trial of these kinds that fails, made small; its script fails alike."""
    random = Random(5)
    drawn = (draw.trial(random, kinds) for _ in range(300))
    one = (one for one in drawn if one.case.dtype == torch.float64 and condition(one.case))
    failing = next((trial, failure) for trial in one if (failure := trial.failure()))
    small, failure = shrunk(*failing)
    assert kind_of(failure) == kind_of(failing[1])
    script: dict[str, Any] = {"__name__": "__main__"}
    with pytest.raises(SystemExit) as ended:
        exec(small.script(failure), script)
    assert ended.value.code == failure
    return small, failure


def test_what_is_planted_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = spoilt(lambda case, ranks: case.packed and ranks > 2 and case.sink)
    monkeypatch.setattr(Case, "run_rank", planted)
    small, failure = found_and_shrunk(["attention"], lambda case: case.op == "varlen" and case.sink)
    assert failure.startswith("dk: error 1.0")
    case = small.case
    assert isinstance(case, Case) and small.ranks == 3 and case.sink and case.length <= 2
    assert (case.heads, case.layout, case.options) == ((1, 1), None, ())


def short_halo(plant: Any) -> None:
    right = convolution_op.halo_of
    plant(convolution_op, "halo_of", lambda segments, width, rank: right(segments, width - 1, rank))


def lost_states(plant: Any) -> None:
    """Where a document goes on on another rank."""
    right = parts.EnteringStates.receive

    def receive(entering: parts.EnteringStates) -> None:
        right(entering)
        entering.states.zero_()

    plant(parts.EnteringStates, "receive", receive)


def states_go_on(plant: Any) -> None:
    """From one document to the next."""
    right = linear_op.call_segments
    plant(
        linear_op,
        "call_segments",
        lambda title, tokens, _, *where: right(title, tokens, None, *where),
    )


def documents_ignored(plant: Any) -> None:
    """Where ranks have as many tokens then, so that nobody refuses it."""
    right = zigzag_allgather_attn_varlen.layout_by_document

    def layout(cu_seqlens: Any, size: int) -> Layout:
        given = right(cu_seqlens, size)
        other = Layout.zigzag(given.total, size)
        return other if other.sizes == given.sizes else given

    plant(zigzag_allgather_attn_varlen, "layout_by_document", layout)


def own_tokens_counted(plant: Any) -> None:
    plant(loss_module, "count_tokens", lambda target, index, group: (target != index).sum())


def own_targets_counted(plant: Any) -> None:
    right = packed._part_of

    def part_of(*given: Any) -> Any:
        part = right(*given)
        counts = part.rollout.bincount(minlength=len(part.target_counts))
        return replace(part, target_counts=counts)

    plant(packed, "_part_of", part_of)


def rolled_too_far(plant: Any) -> None:
    right = layout_ops.move_tokens
    plant(
        layout_ops,
        "move_tokens",
        lambda x, source, target, shift, *where: right(x, source, target, 2 * shift, *where),
    )


class Planted(NamedTuple):
    """What is planted, in which cases it is looked for, what differs, and the smallest case."""

    plant: Callable[[Any], None]
    kind: str
    only: dict[str, Any]
    differs: str
    smallest: dict[str, Any]


PLANTED = {
    "halo": Planted(short_halo, "convolution", {}, "y", {"length": 2, "width": 2, "channels": 1}),
    "rank border": Planted(lost_states, "linear-attention", {}, "out", {"length": 2}),
    "document border": Planted(
        states_go_on,
        "linear-attention",
        {"initial": False, "final": False},
        "out",
        {"length": 2, "cu_seqlens": (0, 1, 2), "dims": (1, 1)},
    ),
    "layout": Planted(
        documents_ignored,
        "attention",
        {"op": "gathered keys"},
        "out",
        {"length": 2, "heads": (1, 1), "options": ()},
    ),
    "tokens": Planted(own_tokens_counted, "loss", {}, "loss", {"length": 2, "bias": False}),
    "shift": Planted(rolled_too_far, "moves", {}, "y", {"length": 2, "dim": 0, "others": ()}),
    "targets": Planted(own_targets_counted, "rollouts", {}, "loss", {"chunked": False}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_in_a_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = PLANTED[name]
    planted.plant(monkeypatch.setattr)

    def fits(case: Any) -> bool:
        return all(getattr(case, field) == value for field, value in planted.only.items())

    small, failure = found_and_shrunk([planted.kind], fits)
    assert small.ranks <= 2 and failure.startswith(f"{planted.differs}: ")
    assert small.case.layout is None and small.case.rows <= 4
    for field, value in planted.smallest.items():
        assert getattr(small.case, field) == value


def test_an_error_is_a_failure() -> None:
    assert Trial(Case("ring", 8, sizes=(3, 5), options=(("kernel", "flash4"),)), 2).failure()
    assert not Trial(Case("ring", 8), 2).failure()


def test_ranks_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all should have the same, as the loss with the vocabulary cut."""
    trial, right = Trial(LossCase(length=3, by_vocabulary=True), 3), LossCase.call_on_rank
    assert not trial.failure()

    def other(case: LossCase, given: Any, rank: int, *ranks: Any) -> Any:
        loss, lse = right(case, given, rank, *ranks)
        return loss + 1e-12 * (rank == 1), lse

    monkeypatch.setattr(LossCase, "call_on_rank", other)
    assert trial.failure() == "AssertionError: loss of ranks [1] is not that of rank 0"
