"""What errors of annotations and ops say, word for word, and that no raise is left out."""

import ast
import copy
import pickle
import re
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from annotations import binding, grammar, registry, rules, solving
from annotations.binding import bind
from annotations.errors import AnnotationSyntaxError, BindingError, PartitionError
from annotations.grammar import Annotation
from annotations.library import declaration

from .binding_texts import BINDING, GQA, K, Q
from .op_texts import OTHERS
from .partition_texts import BOUND, PARTITION
from .syntax_texts import SYNTAX


def text_of(error_type, function, *args) -> str:
    """The text of the error that ``function`` raises, after a newline, as the tests write it."""
    with pytest.raises(error_type) as info:
        function(*args)
    assert type(info.value) is error_type and isinstance(info.value, ValueError)
    return f"\n{info.value}\n"


def tables() -> Iterator[tuple]:
    """Name, type, call and whole text of all of them."""
    for text, said in SYNTAX.items():
        yield text, AnnotationSyntaxError, partial(Annotation.parse, text), said
    for name, (args, said) in BINDING.items():
        error_type = AnnotationSyntaxError if name == "syntax_error" else BindingError
        yield name, error_type, partial(bind, *args), said
    for identifier, said in PARTITION.items():
        yield identifier, PartitionError, partial(BOUND.split, identifier), said
    for name, (error_type, call, said) in OTHERS.items():
        yield name, error_type, call, said


CASES = list(tables())


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_whole_text(case):
    _, error_type, call, said = case
    text = re.sub(r"\S+\.py:\d+", "FILE:LINE", text_of(error_type, call))
    assert re.sub(r"\(aten\.[\w.]+\)", "(DRAWN)", text) == said


@pytest.mark.parametrize("identifier", PARTITION)
def test_divisible_refuses_what_split_refuses(identifier):
    assert text_of(PartitionError, BOUND.divisible, identifier, 2) == PARTITION[identifier]


def raised_at(error: BaseException | None) -> Iterator[tuple[str, int]]:
    """File and line where ``error``, and each error it was made of, was raised."""
    while error is not None:
        frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
        yield frame.f_code.co_filename, line
        error = error.__context__


def missed_raises(module, cases) -> list[int]:
    """The lines of ``raise`` statements of ``module`` where no case's error comes from."""
    reached = set()
    for _, error_type, call, _ in cases:
        with pytest.raises(error_type) as info:
            call()
        reached.update(line for file, line in raised_at(info.value) if file == module.__file__)
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    raises = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    assert raises
    return [r.lineno for r in raises if not reached & {*range(r.lineno, r.end_lineno + 1)}]


@pytest.mark.parametrize("module", [grammar, binding, solving, rules, registry, declaration])
def test_every_raise_has_a_whole_text(module):
    assert missed_raises(module, CASES) == []


def test_a_raise_without_a_whole_text_is_noticed():
    assert len(missed_raises(grammar, [case for case in CASES if case[0] != "* a * -> a"])) == 1
    assert len(missed_raises(rules, [case for case in CASES if case[0] != "no_group"])) == 1


def test_the_caret_fits_a_text_of_several_lines():
    text = """
the annotation has no '->'
    a,  b
    ^~~~~
    expected: inputs -> outputs, such as 'm k+, k+ n -> m n'
"""
    assert text_of(AnnotationSyntaxError, Annotation.parse, "a,\n\tb\n") == text


def test_no_text_no_caret():
    text = """
the annotation has no '->'
    expected: inputs -> outputs, such as 'm k+, k+ n -> m n'
"""
    assert text_of(AnnotationSyntaxError, Annotation.parse, "") == text


def test_suggested_shapes_were_tried():
    with pytest.raises(BindingError) as info:
        bind(GQA, "op", ["q", "k", "v"], [Q, K, (2, 96, 3, 48)])
    assert info.value.details[-1] == "expected: v of shape (2, 128, 2, 48)"
    bind(GQA, "op", ["q", "k", "v"], [Q, K, (2, 128, 2, 48)])


def test_the_op_is_named_once():
    error = BindingError("wrong", "a -> a", (0, 1), ["more"])
    assert str(error) == "wrong\n    a -> a\n    ^\n    more"
    named = error.in_op("op")
    assert type(named) is BindingError
    assert str(named) == str(named.in_op("outer")) == "op: wrong\n    a -> a\n    ^\n    more"


@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
def test_errors_travel_between_processes(copied):
    error = PartitionError("wrong", "a -> a", (0, 1), ["more"], "op")
    assert type(copied(error)) is PartitionError and str(copied(error)) == str(error)


def test_an_error_may_be_of_one_line():
    assert str(PartitionError("op: wrong")) == "op: wrong"
