"""Random annotations with shapes that fit them, or nearly, for property tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Shape = tuple[int, ...] | None  # None: not a tensor
Call = tuple[str, tuple[Shape, ...], dict[str, int]]  # text, input shapes, integer arguments

NAMES = "abcd"
_ODDS = st.integers(0, 9)


class _Writer:
    """Writes tensors of one annotation, each part with its size."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        marks = st.sampled_from(["", "", "", "+", "^"])
        self.draw = draw
        self.mark = {name: draw(marks) for name in (*NAMES, "*", "z")}
        self.size = {name: draw(st.sampled_from([2, 3, 4, 6])) for name in (*NAMES, "z")}
        self.star = draw(st.lists(st.sampled_from([2, 3]), max_size=2))
        self.names = list(NAMES)  # to choose from
        self.used: set[str] = set()

    def part(self) -> tuple[str, int]:
        """A name or a number; rarely with another mark than before."""
        if self.draw(_ODDS) < 2:
            number = self.draw(st.sampled_from([1, 1, 2, 4]))
            return f"{number}{self.draw(st.sampled_from(['', '', '^', '+']))}", number
        name = self.draw(st.sampled_from(self.names))
        self.used.add(name)
        usual = self.draw(st.integers(0, 50))
        return name + (self.mark[name] if usual else "+"), self.size[name]

    def dim(self) -> tuple[str, list[int]]:
        """A part or brackets, with the tensor dims it stands for."""
        kind = self.draw(_ODDS)
        if kind > 2:
            text, number = self.part()
            return text, [number]
        parts = [self.part() for _ in range(self.draw(st.integers(0 if kind == 0 else 2, 3)))]
        product = math.prod(number for _, number in parts)
        return f"({' '.join(text for text, _ in parts)})", [product] if parts else []

    def tensor(self) -> tuple[str, Shape]:
        """A tensor or what is none."""
        if self.draw(_ODDS) == 0:
            text = self.draw(st.sampled_from(["?", "/", "? : /a"]))
            return text, self.draw(st.sampled_from([None, (2,)]))
        dims = [self.dim() for _ in range(self.draw(st.integers(1, 3)))]
        for _ in range(self.draw(st.sampled_from([0, 0, 0, 0, 0, 0, 1, 1, 1, 2]))):
            dims.insert(self.draw(st.integers(0, len(dims))), ("*" + self.mark["*"], self.star))
        text = self.draw(st.sampled_from([" ", "  "])).join(text for text, _ in dims)
        if self.draw(_ODDS) < 2:
            modifiers = st.lists(st.sampled_from(["/", "/a", "/b", "/c"]), max_size=2)
            text += self.draw(st.sampled_from([" : ", ":"])) + " ".join(self.draw(modifiers))
        return text, tuple(number for _, numbers in dims for number in numbers)


@st.composite
def calls(draw: Callable[..., Any]) -> Call:
    """An annotation and shapes that fit it, or nearly."""
    writer = _Writer(draw)
    inputs = [writer.tensor() for _ in range(draw(st.sampled_from([0, 1, 2, 2, 3])))]
    writer.names = [*(sorted(writer.used) or NAMES) * 4, "z"]  # 'z' is in no input
    outputs = [writer.tensor()[0] for _ in range(draw(st.sampled_from([0, 1, 1, 2])))]
    text = f"{', '.join(text for text, _ in inputs)} -> {', '.join(outputs)}"
    given = st.one_of(st.just(set(writer.size)), st.sets(st.sampled_from(sorted(writer.size))))
    sizes = {name: writer.size[name] for name in sorted(draw(given))}
    if draw(_ODDS) == 0:
        sizes["a"] = 5
    return text, tuple(_spoilt(draw, [shape for _, shape in inputs])), sizes


def _spoilt(draw: Callable[..., Any], shapes: list[Shape]) -> list[Shape]:
    """Shapes as they are or, one time in four, with something wrong in them."""
    what = draw(st.integers(0, 19))
    if not shapes or what > 4:
        return shapes
    at = draw(st.integers(0, len(shapes) - 1))
    shape = shapes[at] or (2,)
    if what == 4:
        return shapes[:-1]
    wrong = [(*shape[:-1], shape[-1] + 1), (*shape, 2), shape[:-1] or None, None][what]
    return [*shapes[:at], wrong, *shapes[at + 1 :]]


@st.composite
def misspelt(draw: Callable[..., Any]) -> Call:
    """A call with a character or two of its annotation put in, left out or replaced."""
    text, shapes, sizes = draw(calls())
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(text)))
        sign = draw(st.sampled_from([*"()+^/:,*?a1 ", "->", ""]))
        text = text[:at] + sign + text[at + draw(st.integers(0, 1)) :]
    return text, shapes, sizes
