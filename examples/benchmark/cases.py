"""What is measured: masks, lengths and heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from customized_ops.ring_attention import AttnMask

from .documents import document_bounds

K = 1024
BACKWARD_WORK = 2.5  # of the forward's: five products of matrices instead of two


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
        kind: what says which pairs attend: "causal", "packed" (``bounds``), "window", "streaming"
            (``window`` and ``sink_tokens``) or "masked" (the mask alone).
        heads: of q, and of k and v.
        window: how far back a row attends, or -1.
        make: the same case of another length.
    """

    name: str
    kind: str
    mask: AttnMask
    heads: tuple[int, int]
    head_dim: int
    bounds: tuple[int, ...] = ()
    window: int = -1
    sink_tokens: int = 0
    make: Callable[[int], Case] | None = None

    @property
    def tokens(self) -> int:
        """Of the whole sequence, rows and keys alike."""
        return self.mask.q_len

    @property
    def forward_flop(self) -> float:
        """Two products of matrices over the attended pairs."""
        return 4.0 * self.mask.area * self.heads[0] * self.head_dim

    @property
    def flop(self) -> float:
        """Forward and backward."""
        return (1 + BACKWARD_WORK) * self.forward_flop

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(b - a for a, b in pairwise(self.bounds))

    @property
    def title(self) -> str:
        """For a person."""
        h, g = self.heads
        return f"{self.name}, {short(self.tokens)} tokens, {h}:{g} heads"


def short(tokens: int) -> str:
    """64k, 1M, or all digits."""
    for unit, letter in ((K * K, "M"), (K, "k")):
        if tokens and tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)


class Maker:
    """Makes cases with the options of a run."""

    def __init__(
        self, heads: tuple[int, int], head_dim: int, seed: int, document_multiple: int
    ) -> None:
        self.rest: dict[str, Any] = {"heads": heads, "head_dim": head_dim}
        self.seed, self.multiple = seed, document_multiple

    def of(self, kind: str, n: int) -> Case:
        """A case of a kind below, of ``n`` tokens."""
        case = getattr(self, kind)(n)
        return replace(case, make=lambda other: self.of(kind, other))

    def causal(self, n: int) -> Case:
        """Each token sees itself and all before."""
        return Case("causal", "causal", AttnMask.causal(n), bounds=(0, n), **self.rest)

    def packed(self, n: int) -> Case:
        """Causal documents as long as those of a corpus."""
        bounds = document_bounds(n, self.seed, self.multiple)
        mask = AttnMask.varlen(bounds, causal=True)
        name = f"packed, {len(bounds) - 1} documents"
        return Case(name, "packed", mask, bounds=bounds, **self.rest)

    def window(self, n: int) -> Case:
        """4096 tokens back, fewer in a short sequence."""
        w = min(4096, n // 4)
        mask = AttnMask.sliding_window(n, w, 0)
        return Case(f"window {w}", "window", mask, bounds=(0, n), window=w, **self.rest)

    def streaming(self, n: int) -> Case:
        """StreamingLLM: a window, and the first tokens."""
        w, sinks = min(4096, n // 4), min(128, n // 16)
        name = f"streaming {w} + {sinks}"
        mask = AttnMask.streaming(n, w, sinks)
        return Case(name, "streaming", mask, window=w, sink_tokens=sinks, **self.rest)

    def block_causal(self, n: int) -> Case:
        """Blocks see themselves whole, and all before."""
        block = min(2048, n // 4)
        mask = AttnMask.block_causal(n, block)
        return Case(f"block-causal {block}", "masked", mask, **self.rest)

    def prefix_lm(self, n: int) -> Case:
        """All see the first quarter, the rest is causal."""
        mask = AttnMask.prefix_lm(n, n // 4)
        return Case(f"prefix-LM {n // 4}", "masked", mask, **self.rest)

    def shared_question(self, n: int) -> Case:
        """A question of a quarter of the tokens and 6 answers."""
        prefix, answer = n // 4, n // 8
        branches = [answer] * 5 + [n - prefix - 5 * answer]
        mask = AttnMask.shared_prefix(prefix, branches)
        return Case(f"shared question {prefix} + 6", "masked", mask, **self.rest)


KINDS = (
    *("causal", "packed", "window", "streaming"),
    *("block_causal", "prefix_lm", "shared_question"),
)
MASKS = KINDS[2:]
HEADS = ((32, 8), (64, 8), (16, 16), (16, 1))
# Kinds and tokens, most important first, as what no time is left for is left out.
SUITES: dict[str, tuple[tuple[str, int], ...]] = {
    "causal": tuple(("causal", n * K) for n in (64, 32, 16, 8, 128)),
    "packed": tuple(("packed", n * K) for n in (64, 32, 16, 128)),
    "masks": tuple((kind, 64 * K) for kind in MASKS),
    "heads": (("causal", 32 * K),),
    "long": (("window", K * K), ("causal", K * K)),
}
SUITES["all"] = (
    *SUITES["causal"][:4],
    *SUITES["packed"][:3],
    *SUITES["masks"],
    ("causal", 128 * K),
    ("packed", 128 * K),
    ("window", K * K),
)


def chosen(
    suite: str,
    tokens: list[int] | None,
    heads: tuple[int, int],
    head_dim: int,
    seed: int,
    document_multiple: int,
) -> list[Case]:
    """The cases of a suite; ``tokens`` replaces its lengths."""
    pairs = SUITES[suite]
    if tokens:
        pairs = tuple((kind, n) for kind in dict.fromkeys(k for k, _ in pairs) for n in tokens)

    def make(kind: str, n: int, of_heads: tuple[int, int]) -> Case:
        return Maker(of_heads, head_dim, seed, document_multiple).of(kind, n)

    cases = [
        make(kind, n, of_heads)
        for kind, n in pairs
        for of_heads in (HEADS if suite == "heads" else (heads,))
    ]
    if suite == "all":
        cases += [make("causal", n, h) for n in tokens or (32 * K,) for h in HEADS if h != heads]
    if suite == "all" and not tokens:
        cases.append(make("causal", K * K, heads))
    return cases
