"""Parsers of sizes, windows and heads in command-line options; any other text raises
ArgumentTypeError."""

from __future__ import annotations

import argparse
import re

SUFFIXES = {"K": 1 << 10, "M": 1 << 20}
MOST = 1 << 28  # tokens whose sums fit a small machine


def size(text: str) -> int:
    """'64K' -> 65536."""
    match = re.fullmatch(r"(-?\d+)([KM]?)", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 4096, 64K or 1M")
    found = int(match[1]) * SUFFIXES.get(match[2], 1)
    if found > MOST:
        raise argparse.ArgumentTypeError(f"must be at most {MOST}, got {text}")
    return found


def positive(text: str) -> int:
    """A size of 1 or more."""
    count = size(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return count


def reach(text: str) -> int | tuple[int, int]:
    """Tokens seen: before a token, or before and after it."""
    sides = tuple(size(side) for side in text.split(","))
    if len(sides) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not LEFT or LEFT,RIGHT")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def size_list(text: str) -> list[int]:
    """Sizes separated by commas."""
    return [size(each) for each in text.split(",")]


def heads(text: str) -> tuple[int, int]:
    """Numbers of query heads and of key heads."""
    if not re.fullmatch(r"\d+(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not Q:KV, such as 32:8")
    counts = [positive(count) for count in text.split(":")]
    if counts[0] % counts[-1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not Q:KV with Q a multiple of KV")
    return counts[0], counts[-1]


def team(text: str) -> int | None:
    """Ranks of a team; None means that it is chosen."""
    return None if text == "auto" else positive(text)
