"""Figures as text to read: numbers, and tables in markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmark.cases import Case, K

FAR = 10  # times


def short(tokens: int) -> str:
    """A length such as 64k or 1M, or with all digits."""
    for unit, letter in ((K * K, "M"), (K, "k")):
        if tokens and tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)


def title(case: Case) -> str:
    """The title of a case."""
    h, g = case.heads
    return f"{case.name}, {short(case.tokens)} tokens, {h}:{g} heads"


def number(value: float | None, digits: int = 3) -> str:
    """A number with this many digits; empty for None."""
    return "" if value is None else f"{value:.{digits}g}" if value < 1000 else f"{value:.0f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction of 1 in percent."""
    return "" if value is None else f"{100 * value:.{digits}f}%"


def above(value: float, least: float) -> str:
    """How far a figure is above, or below, the least that it can be."""
    if value == least:
        return "reached"
    if value > FAR * least:  # a bound that far off says nothing
        return "least 0" if least < 1 else f"over {FAR}x"
    return f"{100 * (value / least - 1):+.1f}%"


def mebibytes(value: float | None) -> str:
    """Bytes in MiB."""
    return "" if value is None else number(value / 2**20)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]], words: int) -> str:
    """A table with aligned columns, the last one ragged; the first ``words`` columns hold words."""
    widths = [max(len(line[n]) for line in (head, *lines)) for n in range(len(head) - 1)]

    def written(line: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if n < words else c.rjust(w)
            for n, (c, w) in enumerate(zip(line, widths, strict=False))
        ]
        return f"| {' | '.join([*padded, line[-1]])} |"

    rule = f"|{'|'.join('-' * (w + 2) for w in widths)}|---|"
    return "\n".join([written(head), rule, *(written(line) for line in lines)])
