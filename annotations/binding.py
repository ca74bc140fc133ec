"""An annotation together with the shapes of one call: sizes, output shapes and possible splits."""

from __future__ import annotations

import enum
import math
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .errors import AnnotationError, BindingError, PartitionError, Span
from .grammar import Annotation, Dim, Reduce, Shape

TensorShape = tuple[int, ...]


class Spread(enum.Enum):
    """How a tensor that a split does not cut lies on the ranks."""

    REPLICATE = "replicate"  # each rank holds all of it
    PARTIAL = "partial"  # the tensor is the sum of what the ranks hold


@dataclass(frozen=True)
class Split:
    """What splitting one identifier does to every tensor of the op.

    An int in ``inputs`` and ``outputs`` is the tensor dim that is cut. Inputs without the
    identifier are replicated; outputs without it are partial if it is marked '+', else replicated.
    ``grad_reduce`` tells, per input, whether its gradient is reduced over the ranks.
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
        """The shape of each output; None where the annotation says '?'. '1' alone gives (1,)."""
        return tuple(
            None if shape.ignored else tuple(_dim_size(dim, self.sizes) for dim in shape.dims)
            for shape in self.annotation.outputs
        )

    def splits(self) -> tuple[Split, ...]:
        """All splits that the annotation allows, in the order in which they appear in it."""
        return tuple(
            self._split(name, reduce)
            for name, reduce in _reduces(self.annotation.inputs).items()
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
        raise PartitionError(
            f"{identifier!r} cannot be split",
            self.annotation.text,
            span,
            [why, f"can be split: {names}"],
            self.op,
        )

    def divisible(self, identifier: str, n: int) -> bool:
        """Whether a split of ``identifier`` over ``n`` ranks is even.

        Raises:
            PartitionError: ``identifier`` is unknown or cannot be split.
        """
        return self.sizes[self.split(identifier).identifier] % n == 0

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
        """The first tensor with ``identifier`` in two dims: cutting both drops its other blocks."""
        shapes = (*self.annotation.inputs, *self.annotation.outputs)
        return next((shape for shape in shapes if len(shape.dims_of(identifier)) > 1), None)

    def _why_frozen(self, identifier: str) -> tuple[Span | None, str]:
        shapes = (*self.annotation.inputs, *self.annotation.outputs)
        dims = [dim for shape in shapes for dim in shape.dims if identifier in dim.identifiers]
        if not dims:
            return None, f"the annotation has no {identifier!r}"
        span = dims[0].span_of(identifier)
        if identifier.isdecimal() or identifier == "?":
            return span, "it is a fixed size" if identifier != "?" else "it is not a dim"
        if inner := next((dim for dim in dims if identifier in dim.inner), None):
            why = f"it is not the first in '{inner}'; only the first can be cut in one piece"
            return inner.span_of(identifier), why
        if identifier not in _reduces(self.annotation.inputs):
            return span, "it is in no input"
        if twice := self._twice(identifier):
            return twice.span, "it is in two dims of one tensor; cutting both would lose data"
        return span, f"it is marked frozen: '{identifier}^'"


@dataclass(frozen=True)
class _Argument:
    """A tensor argument that is annotated dim by dim."""

    name: str
    text: str
    annotated: Shape
    shape: TensorShape

    def dims(self) -> Iterator[tuple[str, Dim, int]]:
        for index, (dim, size) in enumerate(zip(self.annotated.dims, self.shape, strict=True)):
            yield f"dim {index} of {self.name}", dim, size

    def misfit(self, span: Span, *details: str) -> BindingError:
        problem = f"argument {self.name!r} does not fit the annotation"
        return BindingError(problem, self.text, span, details)


class _Known(NamedTuple):
    size: int
    origin: str


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
    keywords = {name: _Known(size, f"argument {name}") for name, size in (sizes or {}).items()}
    try:
        parsed = annotation if isinstance(annotation, Annotation) else Annotation.parse(annotation)
        arguments = _arguments(parsed, arg_names, shapes)
        star = _star(parsed, arguments)
        expanded = replace(
            parsed,
            inputs=tuple(shape.expand(star) for shape in parsed.inputs),
            outputs=tuple(shape.expand(star) for shape in parsed.outputs),
        )
        arguments = [replace(a, annotated=a.annotated.expand(star)) for a in arguments]
        known = _solve(arguments, keywords)
        _add_output_sizes(expanded, known, keywords)
    except AnnotationError as error:
        raise error.in_op(op) from None
    bound = {name: entry.size for name, entry in known.items() if not name.isdecimal()}
    return BoundAnnotation(expanded, op, tuple(shapes), bound)


def _arguments(
    annotation: Annotation, names: Sequence[str], shapes: Sequence[TensorShape | None]
) -> list[_Argument]:
    inputs, text = annotation.inputs, annotation.text
    if len(inputs) != len(shapes):
        span = inputs[len(shapes)].span if len(inputs) > len(shapes) else None
        problem = f"the inputs in the annotation are {len(inputs)}, the arguments {len(shapes)}"
        raise BindingError(problem, text, span, [f"arguments: {', '.join(names) or 'none'}"])
    arguments = []
    for name, annotated, shape in zip(names, inputs, shapes, strict=True):
        if annotated.ignored:
            continue
        if shape is None:
            problem = f"argument {name!r} is not a tensor"
            expected = f"expected: a tensor for {name}, or '?' in the annotation"
            raise BindingError(problem, text, annotated.span, [expected])
        # An input '1' may have no dims, as an output '1' may.
        shape = (1,) if shape == () and str(annotated) == "1" else shape
        arguments.append(_Argument(name, text, annotated, shape))
    return arguments


def _star(annotation: Annotation, arguments: list[_Argument]) -> tuple[Dim, ...]:
    """The dims that '*' stands for. Checks the number of dims of all arguments on the way."""
    first: tuple[_Argument, Dim, int] | None = None
    for argument in arguments:
        name, shape, annotated = argument.name, argument.shape, argument.annotated
        star = annotated.star
        count = len(shape) - len(annotated.dims) + (star is not None)
        if count < 0 or (count > 0 and star is None):
            wanted = f"{len(shape) - count}{' or more' if star else ''} dims, '{annotated}'"
            received = f"but {name} has shape {shape}"
            raise argument.misfit(annotated.span, f"{name} is annotated as {wanted}, {received}")
        if star is None:
            continue
        if first is not None and first[2] != count:
            before = f"'*' is {first[2]} dims in {first[0].name} of shape {first[0].shape}"
            raise argument.misfit(star.span, f"{before}, but {count} in {name} of shape {shape}")
        first = first or (argument, star, count)
    stars = [shape.star for shape in annotation.outputs if shape.star is not None]
    if first is None and stars:
        problem = "'*' is in an output, but in no input"
        raise BindingError(problem, annotation.text, stars[0].span)
    if first is None:
        return ()
    taken = _reduces((*annotation.inputs, *annotation.outputs))
    _, star, count = first
    names = [letter for letter in string.ascii_lowercase if letter not in taken][:count]
    return tuple(Dim((name,), star.reduces) for name in names)


def _solve(
    arguments: Sequence[_Argument], keywords: Mapping[str, _Known], suggest: bool = True
) -> dict[str, _Known]:
    """The size of each identifier of ``arguments``."""
    alone: dict[str, _Known] = {}
    for argument in arguments:
        for here, dim, size in argument.dims():
            if len(dim.identifiers) == 1:
                alone.setdefault(dim.identifiers[0], _Known(size, here))
    # Keywords tell how a dim is made up; a dim of one identifier tells its own size.
    hints = {**alone, **keywords}
    known: dict[str, _Known] = {}
    for argument in arguments:
        for here, dim, size in argument.dims():
            for name in dim.identifiers:
                if name.isdecimal():
                    known[name] = _Known(int(name), "")
                elif name in hints and len(dim.identifiers) > 1:
                    known.setdefault(name, hints[name])
            if wrong := _solve_dim(here, dim, size, known):
                received = f"{wrong}, but {argument.name} has shape {argument.shape}"
                fix = _suggestion(arguments, argument, keywords) if suggest else []
                raise argument.misfit(dim.span, received, *fix)
    return known


def _solve_dim(here: str, dim: Dim, size: int, known: dict[str, _Known]) -> str:
    """Learn from one dim the identifier that is unknown in it, or say what the dim must be."""
    unknown = [name for name in dim.identifiers if name not in known]
    given = [name for name in dim.identifiers if name in known]
    product = math.prod(known[name].size for name in given)
    origins = [f"{n!r} = {known[n].size} from {known[n].origin}" for n in given if known[n].origin]
    of_several = len(dim.identifiers) > 1
    where = f", where {', '.join(origins)}" if of_several and origins else ""
    if len(unknown) > 1 or (unknown and product == 0):
        missing = ", ".join(map(repr, unknown[1:] or unknown))
        return f"{here} is '{dim}', which needs integer arguments for {missing}"
    if unknown and size % product:
        return f"{here} is '{dim}'{where}, a multiple of {product}"
    if unknown:
        known[unknown[0]] = _Known(size // product, here)
    elif product != size:
        return f"{here} is " + (
            f"'{dim}' = {product}{where}" if of_several else (origins or [str(dim)])[0]
        )
    return ""


def _suggestion(
    arguments: Sequence[_Argument], wrong: _Argument, keywords: Mapping[str, _Known]
) -> list[str]:
    """The shape that the other arguments ask of ``wrong``, if with it they all fit."""
    try:
        others = _solve([a for a in arguments if a is not wrong], keywords, suggest=False)
        sizes = {name: entry.size for name, entry in others.items()}
        shape = tuple(
            size if set(dim.named).difference(sizes) else _dim_size(dim, sizes)
            for _, dim, size in wrong.dims()
        )
        right = replace(wrong, shape=shape)
        _solve([right if a is wrong else a for a in arguments], keywords, suggest=False)
    except BindingError:
        return []
    return [f"expected: {wrong.name} of shape {shape}"]


def _add_output_sizes(
    annotation: Annotation, known: dict[str, _Known], keywords: Mapping[str, _Known]
) -> None:
    for index, shape in enumerate(annotation.outputs):
        for dim in () if shape.ignored else shape.dims:
            for name in sorted(set(dim.named).difference(known)):
                if name not in keywords:
                    raise BindingError(
                        f"the shape of output {index} is open: {name!r} is in no input",
                        annotation.text,
                        dim.span_of(name),
                        [f"expected: an integer argument {name!r} of the op, or '?' as the output"],
                    )
                known[name] = keywords[name]


def _dim_size(dim: Dim, sizes: Mapping[str, int]) -> int:
    return math.prod(int(n) if n.isdecimal() else sizes[n] for n in dim.identifiers)


def _reduces(shapes: Sequence[Shape]) -> dict[str, Reduce]:
    """The identifiers of ``shapes``, in order of first appearance, with their marks."""
    return {
        name: reduce
        for shape in shapes
        for dim in shape.dims
        for name, reduce in zip(dim.identifiers, dim.reduces, strict=True)
    }
