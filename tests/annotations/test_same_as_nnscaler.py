"""The same strings mean the same here and in nnscaler 0.9, but for :data:`DIFFERENCES`."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis.strategies import SearchStrategy
from nnscaler_table import Shapes, fit, read_table, split_text, text_of_split
from random_calls import Call, calls, misspelt

from annotations.errors import AnnotationError

TABLE = read_table()
# What a call means: its output shapes and splits, or why it is refused.
Meaning = tuple[Shapes, tuple[str, ...]] | str


def here(text: str, shapes: Shapes, sizes: dict[str, int]) -> Meaning:
    """What we make of a call."""
    try:
        bound = fit(text, shapes, sizes)
    except AnnotationError as error:
        return "; ".join([error.problem, *error.details])
    return bound.output_shapes(), tuple(map(split_text, bound.splits()))


def by_nnscaler(text: str, shapes: Shapes, sizes: dict[str, int]) -> Meaning:
    """What nnscaler makes of a call."""
    from nnscaler.algorithm.ops.dimops import DimSplitEinops
    from nnscaler.graph.function.dimops import IRDimops
    from nnscaler.ir.tensor import IRFullTensor

    tensors = [None if shape is None else IRFullTensor(shape).tosub() for shape in shapes]
    try:
        op = IRDimops(None, "op", "test.op", (text,), tensors, **sizes)
        inferred = op.infer_shape()  # without what is open
    except Exception:  # of all types; nnscaler has none of its own
        return "refused"
    outputs = tuple(inferred.get(i) for i in range(len(op.anno.outputs())))
    algorithm = DimSplitEinops(op)
    splits = []
    for place in op.transform_space():
        name, reduce = algorithm.get_identifier_reduce(*place, num=2)
        if (rule := algorithm.infer(*place, num=2)) is None:
            continue
        cuts = [
            "+".join(map(str, split.dims)) if split.isD() else "P" if split.isV() else "R"
            for split in (*rule.inputs(), *rule.outputs())
        ]
        n = len(shapes)
        reduced = [i not in rule.no_grad_reduce_inputs for i in range(n)]
        splits.append(text_of_split(name + reduce.value, cuts[:n], reduced, cuts[n:]))
    return outputs, tuple(splits)


@dataclass(frozen=True)
class Difference:
    """A call that nnscaler takes otherwise, and why.

    A text in ``ours`` is a pattern of how our error begins.
    """

    why: str
    text: str
    shapes: Shapes
    ours: Meaning
    theirs: Meaning


DIFFERENCES = [
    Difference(
        "cutting two dims of one tensor keeps the blocks of the diagonal and loses the others",
        "l l, l e -> l e",
        ((4, 4), (4, 6)),
        (((4, 6),), ("e: R 1 -> 1",)),
        (((4, 6),), ("l: 0+1 0 -> 0", "e: R 1 -> 1")),
    ),
    Difference(
        "an identifier of one can be cut over one rank; nnscaler goes on to the next in brackets",
        "(a 3) -> a",
        ((3,),),
        (((1,),), ("a: 0 -> 0",)),
        (((1,),), ()),
    ),
    Difference(
        "what is annotated is a tensor, which nnscaler demands of custom ops, but not of its own",
        "a, a -> a",
        ((4,), None),
        r"argument 'x\d' is not a tensor",
        (((4,),), ("a: 0 0 -> 0",)),
    ),
    Difference(
        "a tensor of no dims has none; nnscaler takes it for one of one dim",
        "a -> a",
        ((),),
        r"argument 'x\d' does not fit the annotation; .* has shape \(\)",
        (((1,),), ("a: 0 -> 0",)),
    ),
    Difference("and so '()' is one", "() -> ()", ((),), (((),), ()), "refused"),
    Difference("and '*' may be one", "* -> *", ((),), (((),), ()), (((1,),), ("a: 0 -> 0",))),
    Difference(
        "of two '*', nnscaler takes the second for a name",
        "* * -> *",
        ((2, 4, 6),),
        r"a tensor has more than one '\*'",
        (((2, 4),), ("a: 0 -> 0", "b: 1 -> 1", "*: 2 -> R")),
    ),
    Difference(
        "neither '*' nor '?' can be in brackets; with a mark, nnscaler takes '?' for a name",
        "(a ?^), a -> a",
        ((6,), (2,)),
        r"'[*?][+^]?' is inside brackets",
        (((2,),), ("a: 0 0 -> 0",)),
    ),
    Difference(
        "'/' is not a dim; with a mark, nnscaler takes it for a name",
        "a /+ -> a",
        ((2, 4),),
        "'/' is not a dim",
        (((2,),), ("a: 0 -> 0", "/+: 1 -> P")),
    ),
    Difference(
        "a long annotation may be written in several lines",
        "a\nb -> b",
        ((2, 4),),
        (((4,),), ("a: 0 -> R", "b: 1 -> 0")),
        "refused",
    ),
]


def untorn(splits: tuple[str, ...]) -> tuple[str, ...]:
    """Without the splits that cut one tensor in two dims: the first of the differences."""
    return tuple(split for split in splits if not re.search(r"\d\+\d", split))


def compare(call: Call) -> str:
    """Both take a call and mean the same, or both refuse it, but for the differences; says which.

    The call may have no tensor of no dims, and no whitespace but spaces.
    """
    ours, theirs = here(*call), by_nnscaler(*call)
    if isinstance(ours, str) and isinstance(theirs, str):
        return "refused"
    if isinstance(ours, str):
        known = [d.ours for d in DIFFERENCES if isinstance(d.ours, str)]
        assert any(re.match(problem, ours) for problem in known), (ours, theirs)
        return "refused here alone"
    assert not isinstance(theirs, str), ours
    assume(1 not in fit(*call).sizes.values())  # the second of the differences
    assert ours == (theirs[0], untorn(theirs[1]))
    return "torn in nnscaler alone" if ours != theirs else f"{min(len(ours[1]), 3)} splits"


def test_strings_of_nnscaler() -> None:
    for row in TABLE:
        found = here(row.text, row.shapes, row.sizes)
        assert found == (row.outputs, untorn(row.splits)), row.text


def test_the_table_is_large() -> None:
    assert len({row.text for row in TABLE}) == len(TABLE) >= 300
    assert sum(len(row.splits) for row in TABLE) >= 500
    # All others are split as nnscaler splits them.
    torn = {"(C 16) E^ C, E^ C M^ -> (C 16) M^", "L 8^ (L 2), L E -> 8^ (L 2) E", "l l -> l l"}
    assert torn == {row.text for row in TABLE if untorn(row.splits) != row.splits}


@pytest.mark.parametrize("difference", DIFFERENCES, ids=[d.text for d in DIFFERENCES])
def test_difference_here(difference: Difference) -> None:
    ours = here(difference.text, difference.shapes, {})
    if isinstance(difference.ours, str):
        assert isinstance(ours, str) and re.match(difference.ours, ours)
    else:
        assert ours == difference.ours


@pytest.mark.nnscaler
def test_the_table_is_what_nnscaler_says() -> None:
    for row in TABLE:
        assert by_nnscaler(row.text, row.shapes, row.sizes) == (row.outputs, row.splits), row.text


@pytest.mark.nnscaler
@pytest.mark.parametrize("difference", DIFFERENCES, ids=[d.text for d in DIFFERENCES])
def test_difference_in_nnscaler(difference: Difference) -> None:
    theirs = by_nnscaler(difference.text, difference.shapes, {})
    assert theirs == difference.theirs != difference.ours


@pytest.fixture(autouse=True)
def no_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """nnscaler warns of every tensor that a split tears."""
    monkeypatch.setattr(logging.getLogger("nnscaler"), "level", logging.ERROR)


def outcomes(strategy: SearchStrategy[Call], examples: int) -> Counter[str]:
    """How often :func:`compare` said what."""
    seen: Counter[str] = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(strategy.filter(lambda call: () not in call[1]))
    def run(call: Call) -> None:
        seen[compare(call)] += 1

    run()
    return seen


@pytest.mark.nnscaler
def test_random_calls_mean_the_same() -> None:
    seen = outcomes(calls(), 1000)
    often = ["refused", "0 splits", "1 splits", "2 splits", "torn in nnscaler alone"]
    assert all(seen[outcome] >= 30 for outcome in often), seen


@pytest.mark.nnscaler
def test_random_misspellings_are_refused_alike() -> None:
    seen = outcomes(misspelt(), 600)
    assert seen["refused"] >= 300 and seen["refused"] < 590, seen
