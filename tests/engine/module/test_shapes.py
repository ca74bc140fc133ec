"""One module, inputs of changing shapes: documents, totals, batch sizes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import engine_jobs
import pytest
import shape_jobs as jobs
import torch
import traced_jobs
from dense import assert_same
from ranks import Pool, worlds

from annotations.engines.torch.capture.call_inputs import CallInputs
from annotations.engines.torch.capture.capture import capture
from annotations.engines.torch.capture.open_sizes import NotOpen, conditions_of
from annotations.engines.torch.module.programs import MOST, Programs
from annotations.engines.torch.plan.planning import captured_open

OPEN = frozenset({(0, 0)})  # the tokens of jobs.batch
DOCUMENTS = [(7, 9, 4), (20,), (1, 0, 19), (3, 17), (5, 5, 5, 5, 0)]


class Graph:
    """In place of a planned graph."""

    def __init__(self, captured: Any) -> None:
        self.captured = captured


def alone(lengths: Sequence[int], how: Any = None) -> tuple[float, torch.Tensor]:
    model = jobs.Packed(**(how or {}))
    loss = model(**jobs.batch(lengths))
    loss.backward()
    return loss.item(), model.into.weight.grad


def check(results: Any, batches: Sequence[Sequence[int]], how: Any = None, copies: int = 1) -> None:
    for rank, (steps, _) in enumerate(results):
        copy = rank * copies // len(results)
        for n, (loss, gradient) in enumerate(steps):
            mine = [batches[(n + c) % len(batches)] for c in range(copies)]
            each = [alone(lengths, how) for lengths in mine]
            assert loss == pytest.approx(each[copy][0], rel=1e-12)
            assert_same(f"rank {rank}, batch {n}", gradient, sum(g for _, g in each))


@pytest.mark.thin(4)
@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("shuffles", [False, True])
def test_documents_of_other_number_and_lengths(
    two_ranks: Pool, shuffles: bool, lowered: bool
) -> None:
    """As many tokens a batch: a graph for up to three documents, and one for up to 8."""
    how, unit = {"shuffles": shuffles}, 4 if shuffles else 1
    batches = [[unit * length for length in lengths] for lengths in DOCUMENTS]
    results = two_ranks.run(jobs.steps, batches, "cp", 2, how, lowered)
    check(results, batches, how)
    assert [len(made) for _, made in results] == [2, 2]


def test_a_model_that_counts_documents(two_ranks: Pool) -> None:
    """A graph for each number of documents, as it is a constant there."""
    how = {"counts": "as a number"}
    results = two_ranks.run(jobs.steps, DOCUMENTS[:3], "cp", 2, how)
    check(results, DOCUMENTS[:3], how)
    assert [len(made) for _, made in results] == [2, 2]


@pytest.mark.thin(2)
@pytest.mark.parametrize("policy", ["cp", "auto"])
def test_other_totals(two_ranks: Pool, policy: str) -> None:
    batches = [(7, 9, 4), (30,), (3, 17), (29, 1)]
    results = two_ranks.run(jobs.steps, batches, policy)
    check(results, batches)
    assert [len(made) for _, made in results] == [2, 2]


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        # In an order of each batch's own.
        pytest.param({"window": -1, "tokens": True}, {"hoist": True}, marks=pytest.mark.slow),
        pytest.param({"window": -1}, {"hoist": True}, marks=pytest.mark.slow),
        pytest.param({"window": -1}, {"hoist": False}, marks=pytest.mark.slow),
        pytest.param({"window": None}, {}, marks=pytest.mark.slow),
        pytest.param({"window": 5}, {"hoist": False}, marks=pytest.mark.slow),
    ],
)
@worlds(cpus=[2, 4], gpus=[])
def test_one_graph_for_totals_that_are_cut_as_evenly(ranks: Pool, how: Any, settings: Any) -> None:
    """The first total is captured, then one graph for all of them."""
    check_totals(ranks, [40, 48, 20, 80, 64], [True, True, False, False, False], how, settings)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 fixes totals that are uneven")
@pytest.mark.parametrize("hoist", [False, True])
def test_a_graph_for_even_totals_and_one_for_uneven_ones(two_ranks: Pool, hoist: bool) -> None:
    totals, new = [40, 48, 33, 45, 57, 61, 52], [True, True, True, True, False, False, False]
    check_totals(two_ranks, totals, new, {"window": -1}, {"hoist": hoist})


def check_totals(ranks: Pool, totals: list[int], new: list[bool], how: Any, settings: Any) -> None:
    for steps in ranks.run(traced_jobs.traced, totals, how, settings):
        errors, made, plans = zip(*steps, strict=True)
        assert max(errors) < 1e-10
        assert [count > 0 for count in made] == new
        assert "one graph for other sizes of x" in plans[-1]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("window", "lowered"), [(None, False), (-1, True), (5, False)])
def test_an_order_for_each_batch(two_ranks: Pool, window: int | None, lowered: bool) -> None:
    """Tokens are put in another order by each batch's own lengths, by one graph for all."""
    batches = [(1, 2, 17), *(each for each in DOCUMENTS if len(each) <= 3), (0, 11, 9)]
    how = {"window": window}
    results = two_ranks.run(jobs.steps, batches, "cp", 2, how, lowered, {"hoist": True})
    check(results, batches, how)
    for _, plans in results:
        assert len(plans) == 1
        assert "layout: balanced by document over 20 tokens, permuted once" in plans[0]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "window"), [(500, window) for window in (None, -1, 3, 11)])
@worlds(cpus=[2, 4], gpus=[])
def test_random_documents(ranks: Pool, count: int, window: int | None) -> None:
    """Also more ranks than documents, and all shorter than a rank's share."""
    for error in ranks.run(jobs.random_steps, range(count), 37, window):
        assert error < 1e-10


def test_lengths_stay_on_the_host(two_ranks: Pool) -> None:
    """Of ranks that compute on GPUs; here int32 tensors count as elsewhere. Of random documents the
    first dozen."""
    for error, asked in two_ranks.run(jobs.lengths_elsewhere, range(12), 37):
        assert error < 1e-10 and asked > 0


def test_what_is_cut_does_not_stay_on_the_host(two_ranks: Pool) -> None:
    assert max(two_ranks.run(jobs.integers_elsewhere)) < 1e-12


@pytest.mark.parametrize(
    ("hoist", "inductor"),
    [(False, False), *(pytest.param(h, True, marks=pytest.mark.slow) for h in (False, True))],
)
def test_new_lengths_compile_nothing(two_ranks: Pool, hoist: bool, inductor: bool) -> None:
    """A forward and a backward are compiled, whatever documents follow in the same total. What
    inductor is given is all that counts; its C++ takes long."""
    batches = [(4, 9, 11), (24,), (1, 1, 22), (0, 7, 17), (23, 1), (8, 8, 8)]
    for counts, error in two_ranks.run(jobs.compilations, batches, hoist, inductor):
        assert counts == [2] * len(batches)
        assert error < 1e-10


AHEAD = [(1, 2, 17), (7, 9, 4), (20,), (1, 0, 19), (3, 17)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("settings", [{"hoist": True}, {"hoist": False}, {}], ids=str)
def test_a_loader_plans_ahead_for_a_module(two_ranks: Pool, settings: Any, sent: bool) -> None:
    """For the layout that its plan names, whatever that is: no step makes anything again."""
    found = two_ranks.run(jobs.planned_ahead, AHEAD, settings, "", sent)
    check([(steps, None) for steps, _, _ in found], AHEAD, {"window": -1})
    for _, counts, said in found:
        assert counts == {"layouts": 0, "masks": 0, "plans": 0} and not said


def test_batches_planned_ahead_for_another_layout_are_told(two_ranks: Pool) -> None:
    found = two_ranks.run(jobs.planned_ahead, AHEAD, {"hoist": False}, "balanced")
    check([(steps, None) for steps, _, _ in found], AHEAD, {"window": -1})
    for _, counts, said in found:
        assert counts["plans"] > 0
        assert len(said) == 1 and "made ahead for another layout, and" in said[0]
        assert "layout=module.plan.packed_layout" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_order_for_each_batch_of_several_totals(four_ranks: Pool, plan: int) -> None:
    """Also of totals that do not divide by the ranks, and for copies that meet others."""
    batches, how = [(7, 9, 4), (30, 1), (3, 18, 10), (2, 29)], {"window": -1}
    results = four_ranks.run(jobs.steps, batches, "cp", plan, how, False, {"hoist": True})
    check(results, batches, how, copies=4 // plan)


@pytest.mark.slow
def test_copies_meet_shapes_at_different_times(four_ranks: Pool) -> None:
    """Two copies of two ranks: what one makes the other need not wait for."""
    batches = [(7, 9, 4), (6, 7), (20,)]
    check(four_ranks.run(jobs.steps, batches, "cp", 2), batches, copies=2)


def test_the_last_graphs_are_kept_and_many_are_told_of_once() -> None:
    programs, inputs = Programs(), inputs_of(jobs.Packed(), (3,))
    graphs = []
    warned = []  # how many tokens the graphs had when a warning came
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for tokens in range(4, 4 + MOST + 3):
            flat = inputs.flatten((), jobs.batch((tokens,)))
            takes = replace(inputs, examples=flat)
            graph: Any = Graph(SimpleNamespace(inputs=takes))
            base: Any = SimpleNamespace(captured=graph.captured)
            programs.add((True,), graph, f"plan of {tokens}", base)  # type: ignore[arg-type]
            if tokens == 4:  # one that is open is not one more
                opened: Any = Graph(SimpleNamespace(inputs=takes))
                programs.add((True,), opened, "plan of open sizes")  # type: ignore[arg-type]
            graphs.append((graph, flat))
            warned += [tokens] * (len(caught) - len(warned))
    assert warned == [7] and "inputs of 4 shapes" in str(caught[0].message)
    assert list(programs.plans.values()) == [f"plan of {n}" for n in range(7, 7 + MOST)]
    assert programs.find((True,), graphs[0][1]) is None
    found = programs.find((True,), graphs[3][1])
    assert found is not None and found[0] is graphs[3][0] is programs.latest((True,))


@pytest.mark.slow
def test_batch_sizes_and_lengths(two_ranks: Pool) -> None:
    """The first batch size has a graph, all others share one; another length has its own."""
    shapes = [(3, 16), (4, 16), (5, 16), (2, 16), (3, 16), (1, 33)]
    for results, made in two_ranks.run(jobs.llama_batches, shapes, "cp"):
        assert made == [1, 2, 2, 2, 2, 3]
        for shape, (loss, gradient) in zip(shapes, results, strict=True):
            model = engine_jobs.tiny_llama("ring")
            one = model(**engine_jobs.sample("ring", *shape))
            one.backward()
            assert loss == pytest.approx(one.item(), rel=1e-12)
            assert_same(f"{shape}", gradient, next(model.parameters()).grad)


@pytest.mark.parametrize(
    ("on", "others"),
    [("number", ()), ("branch", (32, 40)), ("buffer", (66, 80)), ("one size", (24,))],
)
def test_a_graph_is_of_sizes_that_compute_the_same(on: str, others: Sequence[int]) -> None:
    """A number of tokens that the model reads is one in the graph; a branch takes other sizes."""
    captured = captured_open(None, traced_jobs.Length(on), jobs.batch((2, 18)), OPEN, 2)
    found = conditions_of(captured)
    for total in (20, 22, 24, 28, 32, 40, 66, 80):
        right = on == "number" or total <= {"branch": 30, "buffer": 64, "one size": 99}[on]
        right = right and total not in others
        assert found.satisfied(captured.inputs.flatten((), jobs.batch((2, total - 2)))) == right


def test_sizes_that_a_model_fixes_are_not_open() -> None:
    with pytest.raises(NotOpen, match=r"the model fixes dim 0 of x to be 21"):
        conditions_of(
            captured_open(None, traced_jobs.Length("this size"), jobs.batch((2, 19)), OPEN, 2)
        )


def inputs_of(model: torch.nn.Module, lengths: Sequence[int]) -> CallInputs:
    return capture(model, jobs.batch(lengths)).inputs


def test_lengths_that_the_model_counts_are_a_shape() -> None:
    """Only what repeated lengths leave as it is takes them."""
    batch = jobs.batch((4, 6))
    inputs = inputs_of(jobs.Packed(), (4, 4, 2))
    flat = inputs.flatten((), batch)
    fitted = inputs.fitted(flat)
    assert fitted is not None and fitted[1].tolist() == [0, 4, 10, 10]
    assert inputs.fitted(inputs.flatten((), jobs.batch((1, 2, 3, 4)))) is None
    flat = inputs.flatten((), jobs.batch((1,) * 10))
    grown = inputs.with_room(flat, flat)
    assert grown["cu_seqlens"].tolist() == [*range(11), *[10] * 6]
    assert inputs.repeatable == {1}
    for how in ("as a number", "in a tensor", "under autocast"):
        assert not inputs_of(jobs.Packed(counts=how), (4, 4, 2)).repeatable


def test_lengths_that_nothing_reads_follow_those_that_are_read() -> None:
    given = jobs.batch((4, 4, 2))
    ends = given["cu_seqlens"]
    for keys in (ends, ends.clone()):
        inputs = capture(jobs.TwoLengths(), {**given, "cu_keys": keys}).inputs
        assert inputs.repeatable == {1, 2}
    with pytest.raises(ValueError, match="as many"):
        jobs.TwoLengths()(**given, cu_keys=ends[1:])
