"""Calls of the short convolution over ranks, and the sum that they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from linear_cases import LinearCase
from torch import Tensor

from customized_ops.causal_conv1d import wrap_causal_conv1d_func
from customized_ops.ring_attention import Layout, run_ranks


@dataclass(frozen=True)
class ConvCase:
    """A call; ``lengths``, ``layout``, ``tokens``, ``dtype`` are those of :class:`LinearCase`."""

    tokens: int = 12
    batch: int = 2
    channels: int = 3
    width: int = 4
    bias: bool = True
    activation: str | None = None
    lengths: tuple[int, ...] | None = None
    layout: str = "contiguous"
    seed: int = 0
    kernel: str = "auto"
    dtype: torch.dtype = torch.float64

    @property
    def like(self) -> LinearCase:
        return LinearCase(self.tokens, lengths=self.lengths, layout=self.layout, seed=self.seed)

    @cached_property
    def given(self) -> dict[str, Tensor]:
        """The whole tensors, leaves."""
        draw = torch.Generator().manual_seed(self.seed)
        shapes = {"x": (self.batch, self.like.total, self.channels)}
        shapes["weight"] = self.channels, self.width
        if self.bias:
            shapes["bias"] = (self.channels,)
        return {
            name: torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
            for name, shape in shapes.items()
        }

    def loss(self, y: Tensor) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(self.seed + 1)
        shape = self.batch, self.like.total, self.channels
        weights = torch.randn(shape, generator=draw, dtype=torch.float64)
        return weights, (y * weights).sum() if y.shape == shape else y

    def expected(self) -> list[Tensor]:
        """y and all gradients, token by token."""
        x, weight = self.given["x"], self.given["weight"]
        ends, rows = self.like.ends, []
        for t in range(self.like.total):
            start = ends[np.searchsorted(ends, t, side="right") - 1]
            terms = [
                weight[:, self.width - 1 - back] * x[:, t - back]
                for back in range(self.width)
                if t - back >= start
            ]
            rows.append(sum(terms, self.given.get("bias", torch.zeros(()))))
        y = torch.stack(rows, 1) if rows else x * weight[:, 0]
        y = torch.nn.functional.silu(y) if self.activation else y
        grads = torch.autograd.grad(self.loss(y)[1], list(self.given.values()), allow_unused=True)
        pairs = zip(grads, self.given.values(), strict=True)
        return [y.detach(), *(torch.zeros_like(t) if g is None else g for g, t in pairs)]

    def on_rank(self, group: Any, rank: int, ranks: int) -> list[Tensor]:
        """One rank's y and gradients."""
        layout = self.like.layout_over(ranks)
        where = layout or Layout.contiguous(self.like.total, ranks)
        parts = {name: t.detach().clone().to(self.dtype) for name, t in self.given.items()}
        parts["x"] = where.shard(parts["x"], rank).clone()
        leaves = [t.requires_grad_() for t in parts.values()]
        y = wrap_causal_conv1d_func(
            **parts,
            activation=self.activation,
            cu_seqlens=self.like.cu_seqlens,
            process_group=group,
            layout=layout,
            kernel=self.kernel,
        )
        weights = where.shard(self.loss(y)[0], rank)
        return [y.detach(), *torch.autograd.grad((y * weights).sum(), leaves)]

    def assembled(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        layout = self.like.layout_over(len(parts)) or Layout.contiguous(self.like.total, len(parts))
        y, x, *whole = zip(*parts, strict=True)
        return [layout.unshard(y), layout.unshard(x), *(sum(each) for each in whole)]

    def in_process(self, ranks: int) -> list[Tensor]:
        """Over ranks that are threads."""
        return self.assembled(
            run_ranks(ranks, lambda group: self.on_rank(group, group.rank, ranks))
        )


def check(case: ConvCase, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal to 1e-10."""
    for name, x, y in zip(["y", *case.given], found, expected, strict=True):
        assert x.shape == y.shape, f"{case}: {name} is {tuple(x.shape)}, not {tuple(y.shape)}"
        error = (x - y).abs().max().item() if x.numel() else 0.0
        assert error <= 1e-10, f"{case}: {name} is off by {error:.1e}"


def random_case(seed: int) -> tuple[ConvCase, int]:
    """A case, and a number of ranks."""
    draw = np.random.default_rng(seed)
    packed = bool(draw.integers(2))
    layouts = ["contiguous", "uneven", "zigzag", "striped", "balanced", "scattered"]
    layouts += ["by document"] * packed
    case = ConvCase(
        tokens=int(draw.integers(0, 40)),
        batch=1 if packed else int(draw.integers(1, 3)),
        channels=int(draw.integers(1, 4)),
        width=int(draw.integers(1, 7)),
        bias=bool(draw.integers(2)),
        activation=[None, "silu", "swish"][int(draw.integers(3))],
        layout=layouts[int(draw.integers(len(layouts)))],
        seed=seed,
    )
    lengths = draw.choice([0, 1, 2, 3, 5, 17], int(draw.integers(1, 7))).tolist()
    return replace(case, lengths=tuple(lengths) if packed else None), int(draw.integers(1, 9))
