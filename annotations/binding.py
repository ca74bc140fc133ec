"""An annotation together with the shapes of one call: sizes, output shapes and possible splits."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from .errors import AnnotationError, PartitionError, Span
from .grammar import Annotation, Dim, Reduce, Shape
from .solving import (
    Known,
    TensorShape,
    add_output_sizes,
    annotated_arguments,
    dim_size,
    reduces_of,
    solve,
    star_dims,
)


class Spread(enum.Enum):
    """The placement of a tensor that a split does not cut."""

    REPLICATE = "replicate"  # each rank holds all of it
    PARTIAL = "partial"  # the tensor is the sum over the ranks


@dataclass(frozen=True)
class Split:
    """What splitting one identifier does to every tensor of the op.

    An int in ``inputs`` and ``outputs`` is the tensor dim that is cut. Inputs without the
    identifier are replicated; outputs without it are partial if it is marked '+', else replicated.
    ``grad_reduce`` says of each input whether its gradient is reduced over the ranks.
    """

    identifier: str
    reduce: Reduce
    inputs: tuple[int | Spread, ...]
    outputs: tuple[int | Spread, ...]
    grad_reduce: tuple[bool, ...]


@dataclass(frozen=True)
class BoundAnnotation:
    """An annotation with '*' expanded, the input shapes it fits and the size of each identifier."""

    annotation: Annotation
    op: str
    input_shapes: tuple[TensorShape | None, ...]
    sizes: Mapping[str, int] = field(hash=False)

    def output_shapes(self) -> tuple[TensorShape | None, ...]:
        """The shape of each output; None if the annotation says '?'. '1' alone gives (1,)."""
        return self._output_shapes

    @cached_property
    def _output_shapes(self) -> tuple[TensorShape | None, ...]:
        return tuple(
            None if shape.ignored else tuple(dim_size(dim, self.sizes) for dim in shape.dims)
            for shape in self.annotation.outputs
        )

    def splits(self) -> tuple[Split, ...]:
        """All splits that the annotation allows, in the order in which they appear in it."""
        return tuple(
            self._split(name, reduce)
            for name, reduce in reduces_of(self.annotation.inputs).items()
            if reduce is not Reduce.FROZEN and self._twice(name) is None
        )

    def split(self, identifier: str) -> Split:
        """What splitting ``identifier`` does.

        Raises:
            PartitionError: ``identifier`` is unknown or cannot be split; says why, and what can.
        """
        splits = {split.identifier: split for split in self.splits()}
        if identifier in splits:
            return splits[identifier]
        names = ", ".join(repr(name) for name in splits) or "nothing in this annotation"
        span, why = self._why_frozen(identifier)
        raise self.error(f"{identifier!r} cannot be split", span, why, f"can be split: {names}")

    def divisible(self, identifier: str, n: int) -> bool:
        """Whether a split of ``identifier`` over ``n`` ranks is even.

        Raises:
            PartitionError: ``identifier`` is unknown or cannot be split.
        """
        return self.sizes[self.split(identifier).identifier] % n == 0

    def error(self, problem: str, span: Span | None, *details: str) -> PartitionError:
        """The error that the op cannot be split in this way."""
        return PartitionError(problem, self.annotation.text, span, details, self.op)

    def _split(self, identifier: str, reduce: Reduce) -> Split:
        def cut(shape: Shape, otherwise: Spread) -> int | Spread:
            dims = shape.dims_of(identifier)
            return dims[0] if dims else otherwise

        uncut_output = Spread.PARTIAL if reduce is Reduce.SUM else Spread.REPLICATE
        return Split(
            identifier,
            reduce,
            tuple(cut(shape, Spread.REPLICATE) for shape in self.annotation.inputs),
            tuple(cut(shape, uncut_output) for shape in self.annotation.outputs),
            tuple(
                not {"", identifier}.intersection(shape.no_grad_reduce)
                for shape in self.annotation.inputs
            ),
        )

    def _twice(self, identifier: str) -> Shape | None:
        """The first tensor with ``identifier`` in two dims: cutting both would lose blocks."""
        shapes = self.annotation.shapes
        return next((shape for shape in shapes if len(shape.dims_of(identifier)) > 1), None)

    def _why_frozen(self, identifier: str) -> tuple[Span | None, str]:
        span = self.annotation.span_of(identifier)
        if span is None:
            return None, f"the annotation has no {identifier!r}"
        if identifier.isdecimal() or identifier == "?":
            return span, "it is a fixed size" if identifier != "?" else "it is not a dim"
        dims = (dim for shape in self.annotation.shapes for dim in shape.dims)
        if inner := next((dim for dim in dims if identifier in dim.inner), None):
            why = f"it is not the first in '{inner}'; only the first can be cut in one piece"
            return inner.span_of(identifier), why
        if identifier not in reduces_of(self.annotation.inputs):
            return span, "it is in no input"
        if twice := self._twice(identifier):
            return twice.span, "it is in two dims of one tensor; cutting both would lose data"
        return span, f"it is marked frozen: '{identifier}^'"


def torn_dim(bound: BoundAnnotation, split: Split, parts: int) -> Dim | None:
    """A dim in brackets whose blocks a cut over ``parts`` would tear; None if there is none.

    A dim of one name may be cut unevenly. ``(g 4)`` may not: its parts must be multiples of 4 that
    match the parts of ``g`` elsewhere.
    """
    dims = (dim for shape in bound.annotation.shapes for dim in shape.dims)
    blocks = (dim for dim in dims if len(dim.identifiers) > 1)
    block = next((dim for dim in blocks if split.identifier in dim.identifiers), None)
    return None if block is None or bound.divisible(split.identifier, parts) else block


def check_parts(bound: BoundAnnotation, split: Split, parts: int) -> None:
    """Refuse a cut that would tear a dim in brackets: see :func:`torn_dim`.

    Raises:
        PartitionError: names the dim.
    """
    dim = torn_dim(bound, split, parts)
    if dim is not None:
        size = bound.sizes[split.identifier]
        raise bound.error(
            f"{split.identifier!r} = {size} cannot be cut over {parts} ranks",
            dim.span,
            "it is part of an inner dim, so the number of ranks must divide it",
        )


def bind(
    annotation: str | Annotation,
    op: str,
    arg_names: Sequence[str],
    shapes: Sequence[TensorShape | None],
    sizes: Mapping[str, int] | None = None,
) -> BoundAnnotation:
    """Fit an annotation to the shapes of one call.

    Args:
        annotation: the annotation, parsed or not.
        op: the op's name, for errors.
        arg_names: the name of each annotated input, for errors.
        shapes: the shape of each annotated input; None for what is not a tensor.
        sizes: integer keyword arguments of the op. They give the sizes of identifiers in brackets
            and of identifiers that only outputs have.

    Raises:
        AnnotationSyntaxError: ``annotation`` does not parse.
        BindingError: the shapes do not fit the annotation, or leave a size open.
    """
    assert len(arg_names) == len(shapes)
    keywords = {name: Known(size, f"argument {name}") for name, size in (sizes or {}).items()}
    try:
        parsed = annotation if isinstance(annotation, Annotation) else Annotation.parse(annotation)
        arguments = annotated_arguments(parsed, arg_names, shapes)
        star = star_dims(parsed, arguments)
        expanded = replace(
            parsed,
            inputs=tuple(shape.expand(star) for shape in parsed.inputs),
            outputs=tuple(shape.expand(star) for shape in parsed.outputs),
        )
        arguments = [replace(a, annotated=a.annotated.expand(star)) for a in arguments]
        known = solve(arguments, keywords)
        add_output_sizes(expanded, known, keywords)
    except AnnotationError as error:
        raise error.in_op(op) from None
    bound = {name: entry.size for name, entry in known.items() if not name.isdecimal()}
    return BoundAnnotation(expanded, op, tuple(shapes), bound)
