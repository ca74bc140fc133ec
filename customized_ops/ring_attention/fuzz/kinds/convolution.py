"""Cases of the short causal convolution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from ....causal_conv1d import wrap_causal_conv1d_func
from . import along_sequence, sequences
from .along_sequence import AlongSequenceCase
from .distributed_case import WHOLE, Place


@dataclass(frozen=True)
class ConvolutionCase(AlongSequenceCase):
    """A call.

    Attributes:
        channels: d. width: of the filters. wide_filters: weight and bias in fp32, x in less.
    """

    channels: int = 1
    width: int = 2
    bias: bool = False
    activation: str | None = None
    wide_filters: bool = False

    SIMPLER: ClassVar[tuple[str, ...]] = (
        *("strided", "wide_filters", "activation", "bias", "batch", "layout", "dtype", "channels"),
        "seed",
    )
    RESULTS: ClassVar[tuple[str, ...]] = ("y",)
    PARAMETERS: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def arguments(self) -> dict[str, Tensor]:
        normal = self.normal()
        given = {"x": normal(*self.tokens, self.channels)}
        given["weight"] = normal(self.channels, self.width)
        if self.bias:
            given["bias"] = normal(self.channels)
        if self.wide_filters and self.dtype != torch.float64:
            given |= {n: given[n].float() for n in ("weight", "bias") if n in given}
        return given

    def upstream(self) -> dict[str, Tensor]:
        return {"y": self.normal(1)(*self.tokens, self.channels)}

    def places(self, ranks: int) -> dict[str, Place]:
        """Everything is cut by tokens, except the filters."""
        tokens = self.by_tokens(ranks)
        return {"x": tokens, "y": tokens, "weight": WHOLE, "bias": WHOLE}

    def call_on_rank(
        self, given: Mapping[str, Tensor], rank: int, ranks: int, group: Any
    ) -> tuple[Tensor, ...]:
        where = self.where(ranks, group) | {"activation": self.activation}
        return (wrap_causal_conv1d_func(**{**given, **where}),)

    def specification(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The sum over taps of x, shifted by each tap; 0 where that is another document's token."""
        x, weight = given["x"], given["weight"]
        ends, token = torch.tensor(self.ends), torch.arange(self.length)
        begin = ends[torch.searchsorted(ends, token, right=True) - 1]
        y = x * 0 + given.get("bias", torch.zeros(()))
        for back in range(self.width):
            inside = (token - back >= begin).unsqueeze(-1)
            moved = x[:, (token - back).clamp(min=0)] * inside
            y = y + weight[:, self.width - 1 - back] * moved
        return (torch.nn.functional.silu(y) if self.activation else y,)

    def fewer(self) -> Iterator[Self]:
        """Cases with fewer tokens, or with narrower filters."""
        if self.width > 1:
            yield replace(self, width=self.width - 1)
        yield from super().fewer()


def drawn(random: Random, ranks: int) -> ConvolutionCase:
    return ConvolutionCase(
        **along_sequence.drawn(random, ranks),
        channels=random.randint(1, 5),
        width=random.choice([1, 2, 3, 4, 4, 4, 7, 12]),
        bias=random.random() < 0.5,
        activation=random.choice([None, "silu", "swish"]),
        wide_filters=sequences.rarely(random),
    )
