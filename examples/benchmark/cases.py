"""What is measured: masks, lengths and heads."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmark.documents import document_bounds
from customized_ops.ring_attention import AttnMask

K = 1024
BACKWARD_WORK = 2.5  # times the forward's: five matrix products instead of two


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
        kind: what says which pairs attend: "causal", "full", "packed" and "packed full" (with
            ``bounds``), "window", "streaming" (``window`` and ``sink_tokens``) or "masked" (the
            mask alone).
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
        """Tokens of the whole sequence, which are both its rows and its keys."""
        return self.mask.q_len

    @property
    def packed(self) -> bool:
        """Whether documents lie one after the other."""
        return self.kind in ("packed", "packed full")

    @property
    def causal(self) -> bool:
        """Whether no token sees a later one, for kinds that define the mask by themselves."""
        return self.kind not in ("full", "packed full")

    @property
    def forward_flop(self) -> float:
        """FLOP of the forward: two matrix products over the attended pairs."""
        return 4.0 * self.mask.area * self.heads[0] * self.head_dim

    @property
    def flop(self) -> float:
        """FLOP of forward and backward."""
        return (1 + BACKWARD_WORK) * self.forward_flop


class Maker:
    """Makes cases with the options of a run."""

    def __init__(
        self, heads: tuple[int, int], head_dim: int, seed: int, document_multiple: int
    ) -> None:
        self.rest: dict[str, Any] = {"heads": heads, "head_dim": head_dim}
        self.seed, self.multiple = seed, document_multiple

    def of(self, kind: str, n: int) -> Case:
        """A case of one of the kinds below, with ``n`` tokens."""
        case = getattr(self, kind)(n)
        return replace(case, make=lambda other: self.of(kind, other))

    def causal(self, n: int) -> Case:
        """Each token sees itself and all tokens before."""
        return Case("causal", "causal", AttnMask.causal(n), bounds=(0, n), **self.rest)

    def full(self, n: int) -> Case:
        """Each token sees all."""
        return Case("full", "full", AttnMask.full(n), bounds=(0, n), **self.rest)

    def packed(self, n: int) -> Case:
        """Causal documents as long as those of a corpus."""
        return self._documents("packed", n, causal=True)

    def packed_full(self, n: int) -> Case:
        """The same documents, each of which sees all of itself."""
        return self._documents("packed full", n, causal=False)

    def _documents(self, kind: str, n: int, *, causal: bool) -> Case:
        bounds = document_bounds(n, self.seed, self.multiple)
        mask = AttnMask.varlen(bounds, causal=causal)
        name = f"{kind}, {len(bounds) - 1} documents"
        return Case(name, kind, mask, bounds=bounds, **self.rest)

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
        """Each block sees all of itself, and all blocks before."""
        block = min(2048, n // 4)
        mask = AttnMask.block_causal(n, block)
        return Case(f"block-causal {block}", "masked", mask, **self.rest)

    def prefix_lm(self, n: int) -> Case:
        """All tokens see the first quarter; the rest is causal."""
        mask = AttnMask.prefix_lm(n, n // 4)
        return Case(f"prefix-LM {n // 4}", "masked", mask, **self.rest)

    def shared_question(self, n: int) -> Case:
        """A question of a quarter of the tokens and 6 answers."""
        prefix, answer = n // 4, n // 8
        branches = [answer] * 5 + [n - prefix - 5 * answer]
        mask = AttnMask.shared_prefix(prefix, branches)
        return Case(f"shared question {prefix} + 6", "masked", mask, **self.rest)


KINDS = (
    *("causal", "full", "packed", "packed_full", "window", "streaming"),
    *("block_causal", "prefix_lm", "shared_question"),
)
MASKS = KINDS[4:]
HEADS = ((32, 8), (64, 8), (16, 16), (16, 1))
EACH = 0  # stands for a length of 8k tokens on each rank
SCALED = ("causal", "packed", "full", "packed_full", "window", "block_causal")
# Kinds and tokens, most important first: cases for which no time is left are skipped.
SUITES: dict[str, tuple[tuple[str, int], ...]] = {
    "causal": tuple(("causal", n * K) for n in (64, 32, 16, 8, 128)),
    "packed": tuple(("packed", n * K) for n in (64, 32, 16, 128)),
    "masks": tuple((kind, 64 * K) for kind in MASKS),
    "heads": (("causal", 32 * K),),
    "long": (("window", K * K), ("causal", K * K)),
    "scale": tuple((kind, n) for n in (64 * K, EACH, 256 * K, 16 * K, K * K) for kind in SCALED),
}
SUITES["all"] = (
    *SUITES["causal"][:4],
    *SUITES["packed"][:3],
    *SUITES["masks"],
    ("causal", 128 * K),
    ("packed", 128 * K),
    ("window", K * K),
)
SUITE_HEADS = {"heads": HEADS, "scale": ((64, 8), (32, 8))}  # other suites: 32:8


def chosen(args: Namespace, ranks: int) -> list[Case]:
    """The cases of a suite; ``--kinds``, ``--tokens`` and ``--heads`` replace its own."""
    pairs = SUITES[args.suite]
    if args.tokens or args.kinds:
        kinds = args.kinds or [kind for kind, _ in pairs]
        pairs = tuple((kind, n) for n in args.tokens or [n for _, n in pairs] for kind in kinds)
    heads = args.heads or SUITE_HEADS.get(args.suite, HEADS[:1])
    wanted = [(kind, n or 8 * K * ranks, h) for kind, n in pairs for h in heads]
    if args.suite == "all" and not args.kinds:
        others = [h for h in HEADS if h not in heads]
        wanted += [("causal", n, h) for n in args.tokens or (32 * K,) for h in others]
        wanted += [("causal", K * K, h) for h in heads if not args.tokens]
    return [
        Maker(h, args.head_dim, args.seed, args.document_multiple).of(kind, n)
        for kind, n, h in dict.fromkeys(wanted)
    ]
