"""What nnscaler 0.9 makes of its own annotation strings: ``annotations/nnscaler_table.txt``.

The strings are those of nnscaler's operators, custom ops, examples, tests and docs, each once, with
shapes that fit. A name's size is even and not one; ``where`` gives the op's integer arguments:

    * a : /c, a b -> * b
        2 4, 4 6 -> 2 6
        c: 0! R -> 0; a: 1 0 -> R; b: R 1 -> 1

The last line is the splits: per tensor the dim that is cut, R(eplicated) or P(artial); ``!`` where
the gradient is not reduced over the ranks; ``0+2`` where two dims are cut. ``none`` is no split.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from annotations.binding import BoundAnnotation, Split, Spread, bind

FILE = Path(__file__).parents[2] / "annotations" / "nnscaler_table.txt"
Shapes = tuple[tuple[int, ...] | None, ...]  # None: not a tensor, or open


@dataclass(frozen=True)
class Row:
    """One string with one call's shapes, and what nnscaler says about them."""

    text: str
    shapes: Shapes
    sizes: dict[str, int]
    outputs: Shapes
    splits: tuple[str, ...]


def read_table() -> list[Row]:
    """The rows of the file."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return [_row(*lines[at : at + 3]) for at in range(0, len(lines), 3)]


def _row(text: str, call: str, splits: str) -> Row:
    shapes, _, where = call.partition(" where ")
    sizes = dict(word.split("=") for word in where.split())
    inputs, outputs = shapes.split("->")
    return Row(
        text,
        _shapes(inputs),
        {name: int(size) for name, size in sizes.items()},
        _shapes(outputs),
        () if splits.strip() == "none" else tuple(splits.strip().split("; ")),
    )


def _shapes(text: str) -> Shapes:
    words = [part.split() for part in text.split(",")] if text.strip() else []
    return tuple(None if word == ["?"] else tuple(map(int, word)) for word in words)


def fit(text: str, shapes: Shapes, sizes: dict[str, int]) -> BoundAnnotation:
    """``bind``, with the arguments called x0, x1, ..."""
    return bind(text, "op", [f"x{i}" for i in range(len(shapes))], shapes, sizes)


def split_text(split: Split) -> str:
    """A split as the table writes it."""
    return text_of_split(
        f"{split.identifier}{split.reduce.value}",
        [_cut(spread) for spread in split.inputs],
        split.grad_reduce,
        [_cut(spread) for spread in split.outputs],
    )


def _cut(spread: int | Spread) -> str:
    return {Spread.REPLICATE: "R", Spread.PARTIAL: "P"}.get(spread, str(spread))  # type: ignore


def text_of_split(name: str, inputs: list[str], grad_reduce, outputs: list[str]) -> str:
    """``name: inputs -> outputs``, with '!' after inputs whose gradient is not reduced."""
    marked = [cut if reduce else f"{cut}!" for cut, reduce in zip(inputs, grad_reduce, strict=True)]
    return f"{name}: {' '.join(marked)} -> {' '.join(outputs)}".rstrip()
