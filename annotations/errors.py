"""The errors of annotated ops. Each shows the annotation with a caret:

    wrap_ring_attn_func: argument 'k' does not fit the annotation
        b l g hd^, b l g hd^, b l g vd^ -> b l g vd^
                     ^
        dim 1 of k is 'l' = 128 from dim 1 of q, but k has shape (2, 96, 8, 64)
        expected: k of shape (2, 128, 8, 64)

A leaf function says what is wrong; the public function that was called adds the op's name, once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

Span = tuple[int, int]

_Error = TypeVar("_Error", bound="AnnotationError")


class AnnotationError(ValueError):
    """An annotation is wrong, or is used wrongly."""

    def __init__(
        self,
        problem: str,
        text: str = "",
        span: Span | None = None,
        details: Sequence[str] = (),
        op: str = "",
    ) -> None:
        """
        Args:
            problem: what is wrong, in one line.
            text: the annotation; empty if there is none to show.
            span: first and one-past-last character of ``text`` to underline; None for no caret.
            details: further lines: what was received, what would be accepted.
            op: the op's name, if known.
        """
        # `args` holds them all, so that the error can be pickled between processes.
        super().__init__(problem, text, span, tuple(details), op)
        self.problem = problem
        self.text = text
        self.span = span
        self.details = tuple(details)
        self.op = op

    def in_op(self: _Error, op: str) -> _Error:
        """The same error, saying that it happened in ``op``; an op already named stays."""
        return type(self)(self.problem, self.text, self.span, self.details, self.op or op)

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.problem}" if self.op else self.problem]
        if self.text:
            # One column per character keeps the caret right in an annotation of several lines.
            lines.append("    " + re.sub(r"\s", " ", self.text).rstrip())
        if self.text and self.span is not None:
            start, end = self.span
            lines.append(" " * (4 + start) + "^" + "~" * (end - start - 1))
        return "\n".join([*lines, *(f"    {detail}" for detail in self.details)])


class AnnotationSyntaxError(AnnotationError):
    """The text is not an annotation."""


class BindingError(AnnotationError):
    """The arguments do not fit the annotation."""


class PartitionError(AnnotationError):
    """The op cannot be split in the way that was asked for."""
