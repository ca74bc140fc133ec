"""Solving an annotation for the sizes of its identifiers, from the shapes of one call.

:func:`annotations.binding.bind` goes through the steps below in their order. Each raises
:class:`BindingError` for what it finds wrong, with a caret under it.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .errors import BindingError, Span
from .grammar import Annotation, Dim, Reduce, Shape

TensorShape = tuple[int, ...]


@dataclass(frozen=True)
class Argument:
    """A tensor argument that is annotated dim by dim."""

    name: str
    text: str
    annotated: Shape
    shape: TensorShape

    def dims(self) -> Iterator[tuple[str, Dim, int]]:
        """Each dim: where it is, as text, how it is annotated, its size."""
        for index, (dim, size) in enumerate(zip(self.annotated.dims, self.shape, strict=True)):
            yield f"dim {index} of {self.name}", dim, size

    def misfit(self, span: Span, *details: str) -> BindingError:
        """The error that this argument does not fit."""
        problem = f"argument {self.name!r} does not fit the annotation"
        return BindingError(problem, self.text, span, details)


class Known(NamedTuple):
    """The size of an identifier, and where it comes from, as text."""

    size: int
    origin: str


def annotated_arguments(
    annotation: Annotation, names: Sequence[str], shapes: Sequence[TensorShape | None]
) -> list[Argument]:
    """The tensor arguments, each with its entry of the annotation; '?' are left out."""
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
        arguments.append(Argument(name, text, annotated, shape))
    return arguments


def star_dims(annotation: Annotation, arguments: list[Argument]) -> tuple[Dim, ...]:
    """The dims that '*' stands for. Checks the number of dims of all arguments on the way."""
    first: tuple[Argument, Dim, int] | None = None
    for argument in arguments:
        name, shape, annotated = argument.name, argument.shape, argument.annotated
        star = annotated.star
        count = len(shape) - len(annotated.dims) + (star is not None)
        if count < 0 or (count > 0 and star is None):
            wanted = f"{_dims(len(shape) - count, ' or more' if star else '')}, '{annotated}'"
            received = f"but {name} has shape {shape}"
            raise argument.misfit(annotated.span, f"{name} is annotated as {wanted}, {received}")
        if star is None:
            continue
        if first is not None and first[2] != count:
            before = f"'*' is {_dims(first[2])} in {first[0].name} of shape {first[0].shape}"
            raise argument.misfit(star.span, f"{before}, but {count} in {name} of shape {shape}")
        first = first or (argument, star, count)
    stars = [shape.star for shape in annotation.outputs if shape.star is not None]
    if first is None and stars:
        problem = "'*' is in an output, but in no input"
        raise BindingError(problem, annotation.text, stars[0].span)
    if first is None:
        return ()
    taken = reduces_of(annotation.shapes)
    _, star, count = first
    names = [letter for letter in string.ascii_lowercase if letter not in taken][:count]
    return tuple(Dim((name,), star.reduces) for name in names)


def _dims(count: int, more: str = "") -> str:
    return f"{count}{more} dim{'' if count == 1 and not more else 's'}"


def solve(
    arguments: Sequence[Argument], keywords: Mapping[str, Known], suggest: bool = True
) -> dict[str, Known]:
    """The size of each identifier of ``arguments``."""
    alone: dict[str, Known] = {}
    for argument in arguments:
        for here, dim, size in argument.dims():
            if len(dim.identifiers) == 1:
                alone.setdefault(dim.identifiers[0], Known(size, here))
    # Keywords give sizes inside brackets; a dim of one identifier gives its own size.
    hints = {**alone, **keywords}
    known: dict[str, Known] = {}
    for argument in arguments:
        for here, dim, size in argument.dims():
            for name in dim.identifiers:
                if name.isdecimal():
                    known[name] = Known(int(name), "")
                elif name in hints and len(dim.identifiers) > 1:
                    known.setdefault(name, hints[name])
            if wrong := _solve_dim(here, dim, size, known):
                received = f"{wrong}, but {argument.name} has shape {argument.shape}"
                fix = _suggestion(arguments, argument, keywords) if suggest else []
                raise argument.misfit(dim.span, received, *fix)
    return known


def _solve_dim(here: str, dim: Dim, size: int, known: dict[str, Known]) -> str:
    """Add the dim's unknown identifier to ``known``; or return what the dim must be."""
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
        known[unknown[0]] = Known(size // product, here)
    elif product != size:
        return f"{here} is " + (
            f"'{dim}' = {product}{where}" if of_several else (origins or [str(dim)])[0]
        )
    return ""


def _suggestion(
    arguments: Sequence[Argument], wrong: Argument, keywords: Mapping[str, Known]
) -> list[str]:
    """The shape of ``wrong`` that fits the other arguments, if there is one."""
    try:
        others = solve([a for a in arguments if a is not wrong], keywords, suggest=False)
        sizes = {name: entry.size for name, entry in others.items()}
        shape = tuple(
            size if set(dim.named).difference(sizes) else dim_size(dim, sizes)
            for _, dim, size in wrong.dims()
        )
        right = replace(wrong, shape=shape)
        solve([right if a is wrong else a for a in arguments], keywords, suggest=False)
    except BindingError:
        return []
    return [f"expected: {wrong.name} of shape {shape}"]


def add_output_sizes(
    annotation: Annotation, known: dict[str, Known], keywords: Mapping[str, Known]
) -> None:
    """Add to ``known`` the identifiers that only outputs have; keywords must give their sizes."""
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


def dim_size(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The product of a dim's identifiers and fixed sizes."""
    return math.prod(int(n) if n.isdecimal() else sizes[n] for n in dim.identifiers)


def reduces_of(shapes: Sequence[Shape]) -> dict[str, Reduce]:
    """The identifiers of ``shapes``, in order of first appearance, with their marks."""
    return {
        name: reduce
        for shape in shapes
        for dim in shape.dims
        for name, reduce in zip(dim.identifiers, dim.reduces, strict=True)
    }
