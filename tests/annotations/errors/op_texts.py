"""What ops that are declared or used wrongly say, whole."""

from functools import partial

import torch
from torch import Tensor

from annotations.binding import check_parts
from annotations.errors import AnnotationError, AnnotationSyntaxError, PartitionError
from annotations.library.declaration import register_op
from annotations.rules import PartitionRule, SplitSite

from .partition_texts import FROZEN, GROUPED, RULE


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
