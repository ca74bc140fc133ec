"""Cases of the chunked cross entropy, with tokens or the vocabulary cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from ....chunk_linear_cross_entropy import chunk_linear_cross_entropy
from ...core.layout import Layout
from ...core.mask import AttnMask
from . import sequences
from .distributed_case import ALIKE, SUMMED, WHOLE, DistributedCase, Place, cut


@dataclass(frozen=True)
class LossCase(DistributedCase):
    """A call.

    Attributes:
        by_vocabulary: whether the weight's rows are cut over ranks; otherwise tokens are.
        lead: dims of hidden before its tokens. width: its last dim.
        ignored: the share of targets that are left out.
        barred: how many of the weight's last rows have a bias of -inf, and are never targets.
        options: softcap, chunk_size and ignore_index, by name.
    """

    length: int
    by_vocabulary: bool = False
    lead: tuple[int, ...] = ()
    vocabulary: int = 2
    width: int = 1
    reduction: str = "mean"
    ignored: float = 0.0
    bias: bool = False
    barred: int = 0
    options: tuple[tuple[str, Any], ...] = ()

    SIMPLER: ClassVar[tuple[str, ...]] = (
        *("options", "strided", "ignored", "barred", "bias", "lead", "layout", "dtype"),
        *("reduction", "width", "seed"),
    )
    RESULTS: ClassVar[tuple[str, ...]] = ("loss", "lse")
    PARAMETERS: ClassVar[tuple[str, ...]] = ("weight", "bias")

    @property
    def rows(self) -> int:
        return torch.Size(self.lead).numel() * self.length

    @property
    def _ignore_index(self) -> int:
        return int(dict(self.options).get("ignore_index", -100))

    @property
    def in_a_layer(self) -> Self:
        """The case in a form for any cut."""
        return replace(super().in_a_layer, by_vocabulary=False)

    def policies(self, ranks: int) -> list[str]:
        """Policies that cut tokens or the batch."""
        tokens = ["cp"] if self.length >= ranks else []
        return ["auto", *tokens, *(["dp"] if self.lead and self.lead[0] >= ranks else [])]

    def arguments(self) -> dict[str, Tensor]:
        normal, tokens = self.normal(), (*self.lead, self.length)
        given = {
            "hidden": normal(*tokens, self.width),
            "weight": normal(self.vocabulary, self.width),
        }
        if self.bias:
            given["bias"] = normal(self.vocabulary)
            given["bias"][self.vocabulary - self.barred :] = -torch.inf
        generator = torch.Generator().manual_seed(self.seed)
        target = torch.randint(self.vocabulary - self.barred, tokens, generator=generator)
        left_out = torch.rand(tokens, generator=generator) < self.ignored
        target = target.masked_fill(left_out, self._ignore_index)
        return {**given, "target": target.to(self.device)}

    def upstream(self) -> dict[str, Tensor]:
        """Gradients of both results, which are wider than half precision."""
        normal, tokens = self.normal(1), (*self.lead, self.length)
        given = {
            "loss": normal(*(tokens if self.reduction == "none" else ())),
            "lse": normal(*tokens),
        }
        return given if self.dtype == torch.float64 else {n: t.float() for n, t in given.items()}

    def places(self, ranks: int) -> dict[str, Place]:
        """Cut by tokens, or by rows of the weight as DTensor cuts them."""
        if self.by_vocabulary:
            each = -(-self.vocabulary // ranks)
            starts = [min(n * each, self.vocabulary) for n in range(ranks + 1)]
            sizes = [b - a for a, b in pairwise(starts)]
            rows = cut(Layout.from_sizes(sizes), 0)
            named = dict.fromkeys(("hidden", "target", "loss", "lse"), ALIKE)
            return {**named, "weight": rows, "bias": rows}
        layout = sequences.layout_of(self.layout, self.length, ranks)
        tokens = cut(layout, len(self.lead))
        return {
            **dict.fromkeys(("hidden", "target", "lse"), tokens),
            **dict.fromkeys(("weight", "bias"), WHOLE),
            "loss": tokens if self.reduction == "none" else SUMMED,
        }

    def call_on_rank(
        self, given: Mapping[str, Tensor], rank: int, ranks: int, group: Any
    ) -> tuple[Tensor, ...]:
        where: dict[str, Any] = {}
        if self.by_vocabulary and group is not None:
            where = {"vocab_group": group, "vocab_size": self.vocabulary}
        elif self.reduction == "mean":
            where = {"token_group": group}
        where |= {"reduction": self.reduction, "return_lse": True, **dict(self.options)}
        found = chunk_linear_cross_entropy(**{**given, **where})
        assert isinstance(found, tuple)
        return found

    def specification(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """torch's own loss over all logits; the mean of no tokens is 0."""
        logits = F.linear(given["hidden"], given["weight"], given.get("bias"))
        if softcap := dict(self.options).get("softcap", 0.0):
            logits = torch.tanh(logits / softcap) * softcap
        lse, target = logits.logsumexp(-1), given["target"]
        counts = target != self._ignore_index
        at = logits.gather(-1, target.masked_fill(~counts, 0).unsqueeze(-1)).squeeze(-1)
        loss = (lse - at) * counts
        if self.reduction != "none":
            loss = loss.sum()
        return loss / counts.sum().clamp(min=1) if self.reduction == "mean" else loss, lse

    def fewer(self) -> Iterator[Self]:
        """Cases with fewer tokens or rows of the weight."""
        if self.vocabulary > 1 + self.barred:
            yield replace(self, vocabulary=1 + self.barred)
            yield replace(self, vocabulary=self.vocabulary - 1)
        yield from (replace(self, length=n) for n in sequences.shorter(self.length))


def drawn(random: Random, ranks: int) -> LossCase:
    length, vocabulary = sequences.length(random), random.choice([random.randint(1, 9), 17, 40])
    by_vocabulary, bias = random.random() < 0.5, random.random() < 0.5
    some = {
        "softcap": random.choice([0.0, 0.0, 1.5]),
        "chunk_size": random.choice([None, 1, 3, 50]),
        "ignore_index": random.choice([-100, -1, 0]),
    }
    usual = {"softcap": 0.0, "chunk_size": None, "ignore_index": -100}
    layout = sequences.layout(random, AttnMask.causal(length), length, ranks)
    return LossCase(
        length,
        by_vocabulary=by_vocabulary,
        lead=random.choice([(), (), (1,), (3,), (2, 2)]),
        vocabulary=vocabulary,
        width=random.randint(1, 6),
        reduction=random.choice(["mean", "sum", "none"]),
        ignored=random.choice([0.0, 0.3, 0.9, 1.0]),
        bias=bias,
        barred=random.randint(0, vocabulary - 1) if bias and sequences.rarely(random) else 0,
        options=tuple((name, value) for name, value in some.items() if value != usual[name]),
        layout=None if by_vocabulary else layout,
        strided=sequences.rarely(random),
        dtype=random.choice(sequences.DTYPES),
        seed=random.randrange(1000),
    )
