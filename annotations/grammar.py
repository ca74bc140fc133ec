"""The annotation language: names for the dims of an op's tensors, and which of them can be split.

=========  ==================================================================  ===================
symbol     meaning                                                             example
=========  ==================================================================  ===================
``a``      a dim that can be split; a name has the same size everywhere        ``a b -> b a``
``a+``     a dim that can be split; outputs without it are then partial sums   ``k+, k+ -> 1``
``a^``     a dim that is never split                                           ``l d^ -> l d^``
``4``      a dim of exactly this size, never split                             ``b 4 -> b``
``(a b)``  one dim made of several; only the first can be split, after any     ``(g 4) -> g``
           leading ``1``; the others are never split, wherever they appear
``()``     no dim; alone, a tensor of no dims                                  ``a -> ()``
``*``      all remaining dims, in one run, the same wherever ``*`` appears     ``* k -> *``
``?``      not a tensor, or one that no split cuts                             ``a, ? -> a``
``: /m``   splitting ``m`` does not reduce the gradient of this input over     ``a : /m, m -> m``
           the ranks; several may follow: ``: /m /n``
``: /``    the same for every split                                            ``a : /, m -> m``
``/``      short for ``? : /``                                                 ``a, / -> a``
``,``      between two tensors                                                 ``a, b -> a b``
``->``     between inputs and outputs, once                                    ``a -> a``
=========  ==================================================================  ===================

A name is a Python identifier and has the same mark (none, ``+`` or ``^``) wherever it appears.

The language is nnscaler's, and its strings mean the same here; the few differences, each with its
reason, are listed in ``tests/annotations/test_same_as_nnscaler.py``.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import dropwhile

from .errors import AnnotationSyntaxError, Span

_NOWHERE: Span = (0, 0)


class Reduce(enum.Enum):
    """How a dim may be split. The value is the mark after its name."""

    SPLIT = ""
    SUM = "+"
    FROZEN = "^"


@dataclass(frozen=True)
class Dim:
    """One tensor dim: one identifier, or several in brackets, outermost first."""

    identifiers: tuple[str, ...]
    reduces: tuple[Reduce, ...]
    span: Span = field(default=_NOWHERE, compare=False, repr=False)
    spans: tuple[Span, ...] = field(default=(), compare=False, repr=False)

    @property
    def named(self) -> tuple[str, ...]:
        """The identifiers that are not sizes."""
        return tuple(name for name in self.identifiers if not name.isdecimal())

    @property
    def leading(self) -> str:
        """The identifier that a cut of this dim cuts."""
        return next((name for name in self.identifiers if name != "1"), "1")

    @property
    def inner(self) -> tuple[str, ...]:
        """The identifiers that can never be split, because another is outside of them."""
        return tuple(dropwhile(lambda identifier: identifier == "1", self.identifiers))[1:]

    def span_of(self, identifier: str) -> Span:
        """Where ``identifier`` is written."""
        return self.spans[self.identifiers.index(identifier)]

    def __str__(self) -> str:
        names = [
            name if name.isdecimal() or name == "?" else name + reduce.value
            for name, reduce in zip(self.identifiers, self.reduces, strict=True)
        ]
        return names[0] if len(names) == 1 else f"({' '.join(names)})"


@dataclass(frozen=True)
class Shape:
    """The dims of one tensor, and the splits that do not reduce its gradient ("" means all)."""

    dims: tuple[Dim, ...]
    no_grad_reduce: tuple[str, ...] = ()
    span: Span = field(default=_NOWHERE, compare=False, repr=False)

    @property
    def ignored(self) -> bool:
        """Whether this is '?': not a tensor, or one that no split cuts."""
        return len(self.dims) == 1 and self.dims[0].identifiers == ("?",)

    @property
    def star(self) -> Dim | None:
        """The '*' of this tensor, if it has one."""
        return next((dim for dim in self.dims if dim.identifiers == ("*",)), None)

    def expand(self, star: tuple[Dim, ...]) -> Shape:
        """This with '*' replaced by the dims ``star``; errors about these point at the '*'."""
        if self.star is None:
            return self
        at, span = self.dims.index(self.star), self.star.span
        dims = tuple(replace(dim, span=span, spans=(span,)) for dim in star)
        return replace(self, dims=self.dims[:at] + dims + self.dims[at + 1 :])

    def dims_of(self, identifier: str) -> tuple[int, ...]:
        """The dims that contain ``identifier``."""
        return tuple(i for i, dim in enumerate(self.dims) if identifier in dim.identifiers)

    def __str__(self) -> str:
        if self.ignored and self.no_grad_reduce == ("",):
            return "/"
        dims = " ".join(map(str, self.dims)) or "()"
        modifiers = "".join(f" /{identifier}" for identifier in self.no_grad_reduce)
        return f"{dims} :{modifiers}" if modifiers else dims


@dataclass(frozen=True)
class Annotation:
    """A parsed annotation. Two that mean the same are equal, however they were written."""

    text: str = field(compare=False)
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    @classmethod
    def parse(cls, text: str) -> Annotation:
        """Parse a text such as ``m k+, k+ n -> m n``, in the language of the table above.

        Raises:
            AnnotationSyntaxError: ``text`` is not in the language.
        """
        return _parse(text)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of all tensors, inputs first."""
        return *self.inputs, *self.outputs

    def span_of(self, identifier: str) -> Span | None:
        """Where ``identifier`` is written first; None if it is not."""
        dims = (dim for shape in self.shapes for dim in shape.dims)
        return next((d.span_of(identifier) for d in dims if identifier in d.identifiers), None)

    def __str__(self) -> str:
        """The canonical form: what cannot be split is marked; it parses to an equal annotation."""
        inputs, outputs = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        return f"{inputs} -> {outputs}".strip()


@dataclass(frozen=True)
class _Token:
    text: str
    span: Span


class _Parser:
    """Recursive descent over one text; every error points at a token of it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [
            _Token(match[0], match.span())
            for match in re.finditer(r"->|[(),:]|(?:(?!->)[^\s(),:])+", text)
        ]

    def error(self, problem: str, span: Span, expected: str) -> AnnotationSyntaxError:
        return AnnotationSyntaxError(problem, self.text, span, [f"expected: {expected}"])

    def annotation(self) -> Annotation:
        arrows = [i for i, token in enumerate(self.tokens) if token.text == "->"]
        example = "inputs -> outputs, such as 'm k+, k+ n -> m n'"
        if not arrows:
            whole = (0, max(1, len(self.text.rstrip())))
            raise self.error("the annotation has no '->'", whole, example)
        if len(arrows) > 1:
            second = self.tokens[arrows[1]].span
            raise self.error("the annotation has more than one '->'", second, example)
        inputs = self.shapes(self.tokens[: arrows[0]])
        outputs = self.shapes(self.tokens[arrows[0] + 1 :])
        return Annotation(self.text, inputs, outputs)

    def shapes(self, tokens: list[_Token]) -> tuple[Shape, ...]:
        if not tokens:
            return ()
        commas = [i for i, token in enumerate(tokens) if token.text == ","]
        starts, ends = [0, *(i + 1 for i in commas)], [*commas, len(tokens)]
        return tuple(
            self.shape(tokens[start:end], tokens[max(0, start - 1)].span)
            for start, end in zip(starts, ends, strict=True)
        )

    def shape(self, tokens: list[_Token], before: Span) -> Shape:
        """The shape written as ``tokens``; an error about an empty one points ``before`` it."""
        span = (tokens[0].span[0], tokens[-1].span[1]) if tokens else before
        if [token.text for token in tokens] == ["/"]:
            return Shape((Dim(("?",), (Reduce.FROZEN,), span, (span,)),), ("",), span)
        colon = next((i for i, token in enumerate(tokens) if token.text == ":"), len(tokens))
        dims = tuple(self.dims(iter(tokens[:colon])))
        stars = [dim for dim in dims if dim.identifiers == ("*",)]
        if len(stars) > 1:
            problem = "a tensor has more than one '*'"
            raise self.error(problem, stars[1].span, "at most one '*' in each tensor")
        return Shape(dims, tuple(map(self.modifier, tokens[colon + 1 :])), span)

    def modifier(self, token: _Token) -> str:
        name = token.text[1:]
        if token.text[0] != "/" or not (name == "" or name.isidentifier()):
            expected = "'/name' or '/' after ':', separated by spaces"
            raise self.error(f"{token.text!r} is not a modifier", token.span, expected)
        return name

    def dims(self, tokens: Iterator[_Token]) -> Iterator[Dim]:
        for token in tokens:
            if token.text == ")":
                raise self.error("')' closes nothing", token.span, "a '(' before it")
            group, close = self.group(token, tokens) if token.text == "(" else ([token], token)
            if not group:
                continue  # `()` adds no dim
            names, reduces = zip(*map(self.identifier, group), strict=True)
            if len(names) > 1 and (special := {"*", "?"}.intersection(names)):
                part = next(part for part in group if part.text[0] in special)
                expected = "only names and sizes in brackets"
                raise self.error(f"{part.text!r} is inside brackets", part.span, expected)
            spans = tuple(part.span for part in group)
            yield Dim(names, reduces, (token.span[0], close.span[1]), spans)

    def group(self, start: _Token, tokens: Iterator[_Token]) -> tuple[list[_Token], _Token]:
        """The tokens up to the ')' that closes ``start``, and that ')'."""
        group: list[_Token] = []
        for token in tokens:
            if token.text == ")":
                return group, token
            if token.text == "(":
                raise self.error("'(' inside brackets", token.span, "brackets without brackets")
            group.append(token)
        raise self.error("'(' is never closed", start.span, "a ')' after it, in the same tensor")

    def identifier(self, token: _Token) -> tuple[str, Reduce]:
        mark = token.text[-1] if token.text[-1] in "+^" else ""
        name = token.text.removesuffix(mark)
        if name == "/":
            expected = "'/' as a whole tensor ('a, / -> a') or after ':' ('a : / -> a')"
            raise self.error("'/' is not a dim", token.span, expected)
        if not (name.isdecimal() or name.isidentifier() or name in ("*", "?")):
            expected = "a name or a size, then at most one of '+' and '^'"
            raise self.error(f"{token.text!r} is not a dim", token.span, expected)
        frozen = name.isdecimal() or name == "?"
        return name, Reduce.FROZEN if frozen else Reduce(mark)


@lru_cache(maxsize=4096)
def _parse(text: str) -> Annotation:
    annotation = _Parser(text).annotation()
    _check_marks(annotation)
    return _freeze_inner(annotation)


def _check_marks(annotation: Annotation) -> None:
    first: dict[str, Reduce] = {}
    dims = (dim for shape in annotation.shapes for dim in shape.dims)
    for dim in dims:
        for name, reduce, span in zip(dim.identifiers, dim.reduces, dim.spans, strict=True):
            before = first.setdefault(name, reduce)
            if before is not reduce:
                details = [
                    f"'{name}{reduce.value}' here, but '{name}{before.value}' before",
                    "expected: the same mark wherever the name appears",
                ]
                problem = f"{name!r} is marked in two ways"
                raise AnnotationSyntaxError(problem, annotation.text, span, details)


def _freeze_inner(annotation: Annotation) -> Annotation:
    """Freeze every name that is inner in some dim: a cut of it would not be one run of the dim."""
    inner = {name for shape in annotation.shapes for dim in shape.dims for name in dim.inner}

    def freeze(dim: Dim) -> Dim:
        reduces = tuple(
            Reduce.FROZEN if name in inner else reduce
            for name, reduce in zip(dim.identifiers, dim.reduces, strict=True)
        )
        return replace(dim, reduces=reduces)

    def frozen(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        return tuple(replace(shape, dims=tuple(map(freeze, shape.dims))) for shape in shapes)

    return replace(annotation, inputs=frozen(annotation.inputs), outputs=frozen(annotation.outputs))
