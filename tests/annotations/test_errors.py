import ast
import copy
import pickle
import re
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from annotations import binding, grammar, registry, rules, solving
from annotations.binding import bind, check_parts
from annotations.errors import AnnotationError, AnnotationSyntaxError, BindingError, PartitionError
from annotations.grammar import Annotation
from annotations.library import declaration
from annotations.library.declaration import register_op
from annotations.rules import Communicates, PartitionRule, SplitSite

GQA = "b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^"
Q, K, V = (2, 128, 8, 64), (2, 128, 2, 64), (2, 128, 2, 64)


def text_of(error_type, function, *args) -> str:
    """The text of the error that ``function`` raises, after a newline, as the tests write it."""
    with pytest.raises(error_type) as info:
        function(*args)
    assert type(info.value) is error_type and isinstance(info.value, ValueError)
    return f"\n{info.value}\n"


# Each text is the whole message, after a newline and before one.
SYNTAX = {
    "a b": """
the annotation has no '->'
    a b
    ^~~
    expected: inputs -> outputs, such as 'm k+, k+ n -> m n'
""",
    "a -> b -> c": """
the annotation has more than one '->'
    a -> b -> c
           ^~
    expected: inputs -> outputs, such as 'm k+, k+ n -> m n'
""",
    "(a (b) c) -> a": """
'(' inside brackets
    (a (b) c) -> a
       ^
    expected: brackets without brackets
""",
    "a, (b c -> a": """
'(' is never closed
    a, (b c -> a
       ^
    expected: a ')' after it, in the same tensor
""",
    "(a, b) -> a": """
'(' is never closed
    (a, b) -> a
    ^
    expected: a ')' after it, in the same tensor
""",
    "a b) -> a": """
')' closes nothing
    a b) -> a
       ^
    expected: a '(' before it
""",
    "a, b++ -> a": """
'b++' is not a dim
    a, b++ -> a
       ^~~
    expected: a name or a size, then at most one of '+' and '^'
""",
    "a +, b -> a": """
'+' is not a dim
    a +, b -> a
      ^
    expected: a name or a size, then at most one of '+' and '^'
""",
    "a-b -> a": """
'a-b' is not a dim
    a-b -> a
    ^~~
    expected: a name or a size, then at most one of '+' and '^'
""",
    "a:b:/b -> a": """
'b' is not a modifier
    a:b:/b -> a
      ^
    expected: '/name' or '/' after ':', separated by spaces
""",
    "a / -> a": """
'/' is not a dim
    a / -> a
      ^
    expected: '/' as a whole tensor ('a, / -> a') or after ':' ('a : / -> a')
""",
    "a, /+ -> a": """
'/' is not a dim
    a, /+ -> a
       ^~
    expected: '/' as a whole tensor ('a, / -> a') or after ':' ('a : / -> a')
""",
    "(a *^) -> a": """
'*^' is inside brackets
    (a *^) -> a
       ^~
    expected: only names and sizes in brackets
""",
    "(4 ?) -> a": """
'?' is inside brackets
    (4 ?) -> a
       ^
    expected: only names and sizes in brackets
""",
    "a, b : m -> a": """
'm' is not a modifier
    a, b : m -> a
           ^
    expected: '/name' or '/' after ':', separated by spaces
""",
    "a : /m /2 -> a": """
'/2' is not a modifier
    a : /m /2 -> a
           ^~
    expected: '/name' or '/' after ':', separated by spaces
""",
    "a : /m : /n -> a": """
':' is not a modifier
    a : /m : /n -> a
           ^
    expected: '/name' or '/' after ':', separated by spaces
""",
    "m k+, k n -> m n": """
'k' is marked in two ways
    m k+, k n -> m n
          ^
    'k' here, but 'k+' before
    expected: the same mark wherever the name appears
""",
    "m (k^ 2), n -> m (n k)": """
'k' is marked in two ways
    m (k^ 2), n -> m (n k)
                        ^
    'k' here, but 'k^' before
    expected: the same mark wherever the name appears
""",
    "* a * -> a": """
a tensor has more than one '*'
    * a * -> a
        ^
    expected: at most one '*' in each tensor
""",
}


BINDING = {
    "l_mismatch_with_a_fix": (
        (GQA, "wrap_ring_attn_func", ["q", "k", "v"], [Q, (2, 96, 2, 64), V]),
        """
wrap_ring_attn_func: argument 'k' does not fit the annotation
    b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^
                     ^
    dim 1 of k is 'l' = 128 from dim 1 of q, but k has shape (2, 96, 2, 64)
    expected: k of shape (2, 128, 2, 64)
""",
    ),
    "mismatch_without_a_certain_fix": (
        (GQA, "op", ["q", "k", "v"], [Q, (2, 96, 2, 64), (2, 96, 2, 64)]),
        """
op: argument 'k' does not fit the annotation
    b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^
                     ^
    dim 1 of k is 'l' = 128 from dim 1 of q, but k has shape (2, 96, 2, 64)
""",
    ),
    "group_mismatch": (
        (GQA, "op", ["q", "k", "v"], [(2, 128, 9, 64), K, V]),
        """
op: argument 'q' does not fit the annotation
    b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^
        ^~~~~
    dim 2 of q is '(g 4)' = 8, where 'g' = 2 from dim 2 of k, but q has shape (2, 128, 9, 64)
    expected: q of shape (2, 128, 8, 64)
""",
    ),
    "not_a_multiple": (
        ("(g 4) -> g", "op", ["x"], [(10,)]),
        """
op: argument 'x' does not fit the annotation
    (g 4) -> g
    ^~~~~
    dim 0 of x is '(g 4)', a multiple of 4, but x has shape (10,)
""",
    ),
    "not_a_multiple_of_an_argument": (
        ("(h d^) -> d^", "op", ["x"], [(12,)], {"h": 5}),
        """
op: argument 'x' does not fit the annotation
    (h d^) -> d^
    ^~~~~~
    dim 0 of x is '(h d^)', where 'h' = 5 from argument h, a multiple of 5, but x has shape (12,)
""",
    ),
    "argument_contradicts": (
        ("(h 6) -> h", "op", ["x"], [(12,)], {"h": 3}),
        """
op: argument 'x' does not fit the annotation
    (h 6) -> h
    ^~~~~
    dim 0 of x is '(h 6)' = 18, where 'h' = 3 from argument h, but x has shape (12,)
""",
    ),
    "fixed_sizes_in_brackets": (
        ("(2 4) -> 1", "op", ["x"], [(9,)]),
        """
op: argument 'x' does not fit the annotation
    (2 4) -> 1
    ^~~~~
    dim 0 of x is '(2 4)' = 8, but x has shape (9,)
    expected: x of shape (8,)
""",
    ),
    "fixed_size": (
        ("a 8 -> a", "op", ["x"], [(2, 7)]),
        """
op: argument 'x' does not fit the annotation
    a 8 -> a
      ^
    dim 1 of x is 8, but x has shape (2, 7)
    expected: x of shape (2, 8)
""",
    ),
    "underdetermined": (
        ("n, (a b c) -> a", "op", ["x", "y"], [(2,), (12,)]),
        """
op: argument 'y' does not fit the annotation
    n, (a b c) -> a
       ^~~~~~~
    dim 0 of y is '(a b^ c^)', which needs integer arguments for 'b', 'c', but y has shape (12,)
""",
    ),
    "underdetermined_by_zero": (
        ("(a b) -> a", "op", ["x"], [(0,)], {"a": 0}),
        """
op: argument 'x' does not fit the annotation
    (a b) -> a
    ^~~~~
    dim 0 of x is '(a b^)', which needs integer arguments for 'b', but x has shape (0,)
""",
    ),
    "too_few_dims": (
        (GQA, "op", ["q", "k", "v"], [Q, (2, 128, 64), V]),
        """
op: argument 'k' does not fit the annotation
    b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^
                   ^~~~~~~~~
    k is annotated as 4 dims, 'b l g hd^', but k has shape (2, 128, 64)
""",
    ),
    "too_few_dims_for_a_star": (
        ("n, * a b -> *", "op", ["x", "y"], [(2,), (2,)]),
        """
op: argument 'y' does not fit the annotation
    n, * a b -> *
       ^~~~~
    y is annotated as 2 or more dims, '* a b', but y has shape (2,)
""",
    ),
    "too_many_dims": (
        ("a -> a", "op", ["x"], [(2, 3)]),
        """
op: argument 'x' does not fit the annotation
    a -> a
    ^
    x is annotated as 1 dim, 'a', but x has shape (2, 3)
""",
    ),
    "no_dim_too_many": (
        ("n, () -> n", "op", ["x", "y"], [(2,), (2,)]),
        """
op: argument 'y' does not fit the annotation
    n, () -> n
       ^~
    y is annotated as 0 dims, '()', but y has shape (2,)
""",
    ),
    "stars_of_two_lengths": (
        ("* k+, * k+ -> *", "op", ["x", "y"], [(2, 3, 4), (3, 4)]),
        """
op: argument 'y' does not fit the annotation
    * k+, * k+ -> *
          ^
    '*' is 2 dims in x of shape (2, 3, 4), but 1 in y of shape (3, 4)
""",
    ),
    "mismatch_in_a_star": (
        ("*, * -> *", "op", ["x", "y"], [(2, 3), (2, 4)]),
        """
op: argument 'y' does not fit the annotation
    *, * -> *
       ^
    dim 1 of y is 'b' = 3 from dim 1 of x, but y has shape (2, 4)
    expected: y of shape (2, 3)
""",
    ),
    "star_in_an_output_only": (
        ("a -> a, b *", "op", ["x"], [(2,)]),
        """
op: '*' is in an output, but in no input
    a -> a, b *
              ^
""",
    ),
    "too_few_arguments": (
        (GQA, "op", ["q", "k"], [Q, K]),
        """
op: the inputs in the annotation are 3, the arguments 2
    b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^
                              ^~~~~~~~~
    arguments: q, k
""",
    ),
    "too_many_arguments": (
        ("a -> a", "op", ["x", "y"], [(2,), (2,)]),
        """
op: the inputs in the annotation are 1, the arguments 2
    a -> a
    arguments: x, y
""",
    ),
    "no_arguments": (
        ("a -> a", "op", [], []),
        """
op: the inputs in the annotation are 1, the arguments 0
    a -> a
    ^
    arguments: none
""",
    ),
    "not_a_tensor": (
        (GQA, "op", ["q", "k", "v"], [Q, None, V]),
        """
op: argument 'k' is not a tensor
    b l (g 4) hd^, b l g hd^, b l g vd^ -> b l (g 4) vd^
                   ^~~~~~~~~
    expected: a tensor for k, or '?' in the annotation
""",
    ),
    "open_output": (
        ("a, ? -> a, (a n)", "op", ["x", "y"], [(2,), None]),
        """
op: the shape of output 1 is open: 'n' is in no input
    a, ? -> a, (a n)
                  ^
    expected: an integer argument 'n' of the op, or '?' as the output
""",
    ),
    "syntax_error": (
        ("a, b^^ -> a", "op", ["x", "y"], [(2,), (2,)]),
        """
op: 'b^^' is not a dim
    a, b^^ -> a
       ^~~
    expected: a name or a size, then at most one of '+' and '^'
""",
    ),
}


PARTITION = {
    "n": """
op: 'n' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
            ^
    it is not the first in '(b n^)'; only the first can be cut in one piece
    can be split: 'a', 'b'
""",
    "c": """
op: 'c' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
                                            ^
    it is not the first in '(n^ c^)'; only the first can be cut in one piece
    can be split: 'a', 'b'
""",
    "k": """
op: 'k' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
                       ^~
    it is marked frozen: 'k^'
    can be split: 'a', 'b'
""",
    "x": """
op: 'x' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
                           ^~~
    it is in two dims of one tensor; cutting both would lose data
    can be split: 'a', 'b'
""",
    "z": """
op: 'z' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
                                               ^
    it is in no input
    can be split: 'a', 'b'
""",
    "4": """
op: '4' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
                                ^
    it is a fixed size
    can be split: 'a', 'b'
""",
    "?": """
op: '?' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
                                  ^
    it is not a dim
    can be split: 'a', 'b'
""",
    "nope": """
op: 'nope' cannot be split
    a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z
    the annotation has no 'nope'
    can be split: 'a', 'b'
""",
}


BOUND = bind(
    "a b, (b n) c : /a, k^, x x, 4 ? -> a (n c) z",
    "op",
    ["p", "q", "r", "s", "t"],
    [(4, 6), (12, 5), (3,), (2, 2), (4, 9)],
    {"z": 2},
)
FROZEN = bind("*^, 4 -> *^", "op", ["x", "y"], [(2, 3), (4,)])
GROUPED = bind("l (g 4), l g -> l (g 4)", "op", ["q", "k"], [(5, 12), (5, 3)])
RULE = PartitionRule(communicates={"l": Communicates(lambda site: {}, None)})


def same(x: Tensor) -> Tensor:
    return x * 1


def by_keyword(x: Tensor, *, y: int = 0) -> Tensor:
    return x * y


register_op("a -> a", name="errortest::taken")(same)
transposed = register_op("a b -> b a", name="errortest::transposed", title="transposed")(same)
two = register_op(lambda x: "a b -> a b, b", name="errortest::two", title="two")(same)
made = register_op(lambda x: x.tolist()[0], name="errortest::made", title="made")(same)
unparsed = register_op(lambda x: "a b", name="errortest::unparsed", title="unparsed")(same)
open_result = register_op("a -> ?", name="errortest::open", title="open_result")(same)


@register_op("a b -> a b", name="errortest::in_place")
def in_place(x: Tensor) -> Tensor:
    return x.mul_(2)


@register_op("a b -> a b", name="errortest::drawing")
def drawing(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5)


def reducing(x: Tensor) -> Tensor:
    return x.sum(1)


def annotate(annotation: str, **rule) -> None:
    """Declare ``reducing``, which the annotation does not suit."""
    rule = PartitionRule(**rule)
    register_op(annotation, name="errortest::reducing", title="reducing", rule=rule)(reducing)


unreduced = register_op(lambda x: "a b -> a", name="errortest::unreduced", title="unreduced")(
    reducing
)


@register_op("a, a -> a", name="errortest::detached")
def detached(x: Tensor, y: Tensor) -> Tensor:
    return x.detach() * y.detach()


def backward_of_detached() -> None:
    detached(torch.ones(2, requires_grad=True), torch.ones(2)).sum().backward()


def declare(function=same, **options):
    register_op("a -> a", **{"name": "errortest::wrong", **options})(function)


OTHERS = {
    "nothing_can_be_split": (
        PartitionError,
        partial(FROZEN.split, "b"),
        """
op: 'b' cannot be split
    *^, 4 -> *^
    ^~
    it is marked frozen: 'b^'
    can be split: nothing in this annotation
""",
    ),
    "no_group": (
        PartitionError,
        partial(RULE.arguments, "op", SplitSite("l", 10, 4, "")),
        "\nop: a split of 'l' over 4 ranks communicates inside the op, but no process group was "
        "given; each rank alone would compute nonsense\n",
    ),
    "parts_that_tear_inner_dims": (
        PartitionError,
        partial(check_parts, GROUPED, GROUPED.split("g"), 2),
        """
op: 'g' = 3 cannot be cut over 2 ranks
    l (g 4), l g -> l (g 4)
      ^~~~~
    it is part of an inner dim, so the number of ranks must divide it
""",
    ),
    "a_name_without_a_namespace": (
        ValueError,
        partial(declare, name="wrong"),
        """
register_op: 'wrong' is not a name such as 'mylib::myop'
""",
    ),
    "a_taken_name": (
        ValueError,
        partial(declare, name="errortest::taken"),
        """
register_op: errortest::taken is registered already, by FILE:LINE
""",
    ),
    "an_argument_by_keyword": (
        ValueError,
        partial(declare, by_keyword),
        """
register_op: argument 'y: int = 0' of errortest::wrong must be one that is passed by position
""",
    ),
    "no_such_argument": (
        ValueError,
        partial(declare, differentiable=["y"]),
        """
register_op: errortest::wrong has no argument 'y' to differentiate
""",
    ),
    "an_annotation_that_does_not_parse": (
        AnnotationSyntaxError,
        partial(register_op, ("a -> a", "b, b")),
        """
the annotation has no '->'
    b, b
    ^~~~
    expected: inputs -> outputs, such as 'm k+, k+ n -> m n'
""",
    ),
    "no_annotation": (
        AnnotationError,
        partial(register_op, ["a -> a"]),
        """
an annotation must be a string or a tuple of strings, got ['a -> a']
""",
    ),
    "made_no_annotation": (
        AnnotationError,
        partial(made, torch.zeros(2)),
        """
made: an annotation must be a string or a tuple of strings, got 0.0
""",
    ),
    "made_one_that_does_not_parse": (
        AnnotationSyntaxError,
        partial(unparsed, torch.zeros(2)),
        """
unparsed: the annotation has no '->'
    a b
    ^~~
    expected: inputs -> outputs, such as 'm k+, k+ n -> m n'
""",
    ),
    "an_open_result_without_fake": (
        AnnotationError,
        partial(open_result.record.empty_results, {"x": torch.zeros(2)}),
        """
open_result: the shape of output 0 is '?': register_op needs fake=
""",
    ),
    "a_function_that_cuts_the_graph": (
        AnnotationError,
        backward_of_detached,
        """
detached: no result depends on x, y for autograd
    expected: differentiable=() for no gradients, or a backward= of its own
""",
    ),
    "more_inputs_than_arguments": (
        AnnotationError,
        partial(annotate, "a b+, b+ -> a"),
        """
reducing: 2 inputs, but the function has 1 arguments
    a b+, b+ -> a
          ^~
    expected: at most one for each of x
""",
    ),
    "other_outputs_than_results": (
        AnnotationError,
        partial(annotate, "a b+ -> a, a"),
        """
reducing: 2 outputs, but the function returns 1
    a b+ -> a, a
               ^
    expected: one output for each tensor that is returned
""",
    ),
    "a_size_that_no_input_has": (
        AnnotationError,
        partial(annotate, "a b+ -> a c"),
        """
reducing: 'c' is in no input, so its size is never known
    a b+ -> a c
              ^
    expected: a name of an input, a size, or '?' as the output, with fake=
""",
    ),
    "a_rule_for_what_is_never_split": (
        AnnotationError,
        partial(annotate, "a b^ -> a", told={"b": dict}),
        """
reducing: the rule is for splits of 'b', which can never be split
    a b^ -> a
      ^~
    expected: rules for 'a'
""",
    ),
    "a_rule_for_what_is_not_there": (
        AnnotationError,
        partial(annotate, "a^ b^ -> a^", told={"l": dict}),
        """
reducing: the rule is for splits of 'l', which can never be split
    a^ b^ -> a^
    expected: rules for nothing: no dim of it can be split
""",
    ),
    "a_split_that_nothing_shows": (
        AnnotationError,
        partial(annotate, "a b -> a"),
        """
reducing: 'b' is in no output, and a split of it would go unnoticed
    a b -> a
      ^
    expected: 'b+' if results are then sums to be added up, 'b^' if it is never to be split, or a \
rule for it
""",
    ),
    "the_same_of_an_annotation_made_for_a_call": (
        AnnotationError,
        partial(unreduced, torch.zeros(2, 3)),
        """
unreduced: 'b' is in no output, and a split of it would go unnoticed
    a b -> a
      ^
    expected: 'b+' if results are then sums to be added up, 'b^' if it is never to be split, or a \
rule for it
""",
    ),
    "an_argument_changed_in_place": (
        AnnotationError,
        partial(in_place, torch.ones(2, 3)),
        """
in_place: the function changed its argument x in place
    expected: a new tensor as the result
""",
    ),
    "random_numbers": (
        AnnotationError,
        partial(drawing, torch.ones(2, 3)),
        """
drawing: the function drew random numbers (DRAWN), and would draw others when it is run again for \
its gradient
    expected: the numbers, or a seed, as an argument; or a backward= of its own
""",
    ),
    "another_shape_than_declared": (
        AnnotationError,
        partial(transposed, torch.zeros(2, 3)),
        """
transposed: result 0 has shape (2, 3), but the annotation says (3, 2): a b -> b a
""",
    ),
    "fewer_results_than_declared": (
        AnnotationError,
        partial(two, torch.zeros(2, 3)),
        """
two: the outputs in the annotation are 2, the results 1
    a b -> a b, b
""",
    ),
}


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
