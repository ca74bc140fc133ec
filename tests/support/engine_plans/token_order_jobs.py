"""A model that shuffles its own packed tokens, and a job that runs it over all ranks."""

from __future__ import annotations

from typing import Any

import steps
import torch
from steps import over_all, refusal
from torch import Tensor, nn

from annotations import parallelize
from customized_ops.ring_attention import (
    Layout,
    wrap_masked_attn_func,
    wrap_maybe_shuffle,
    wrap_maybe_unshuffle,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_roll_func,
    wrap_shard_func,
    wrap_shuffle_func,
    wrap_sliding_window_attn_func,
    wrap_unshard_func,
    wrap_unshuffle_func,
    wrap_zigzag_allgather_attn_varlen_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.core.mask import AttnMask

LENGTH, DIM, HEADS, HEAD_DIM = 24, 8, 2, 4
LISTED = [0, 8, 24]


class Shuffling(nn.Module):
    """A shuffle, a layer or two, and the shuffle's inverse; ``form`` says in what it differs."""

    def __init__(self, form: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.layers = form, 2 if form == "plain" else 1
        layers = range(self.layers)
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in layers)
        self.project = nn.ModuleList(nn.Linear(DIM, 3 * HEADS * HEAD_DIM) for _ in layers)
        self.out = nn.ModuleList(nn.Linear(HEADS * HEAD_DIM, DIM) for _ in layers)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.mask = AttnMask.causal(LENGTH)
        self.double()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu: Any, other: Tensor) -> Tensor:
        match self.form:
            case "other documents":
                return wrap_ring_attn_varlen_func(q, k, v, other, other, causal=True)
            case "masked":
                return wrap_masked_attn_func(q[None], k[None], v[None], self.mask)[0]
            case "dense":
                return wrap_ring_attn_func(q[None], k[None], v[None], causal=True)[0]
            case "window":
                return wrap_sliding_window_attn_func(q, k, v, cu, cu, window_size=(5, 0))
            case "whole keys" | "shuffled whole keys":
                if self.form == "whole keys":
                    k, v = wrap_maybe_unshuffle(k, cu), wrap_maybe_unshuffle(v, cu)
                return wrap_zigzag_allgather_attn_varlen_func(q, k, v, cu, cu, causal=True)
            case "lse":
                out, lse = wrap_ring_attn_varlen_func(q, k, v, cu, cu, causal=True, return_lse=True)
                return out * lse.transpose(0, 1).unsqueeze(-1).exp().to(out.dtype)
        return wrap_ring_attn_varlen_func(q, k, v, cu, cu, causal=True)

    def layer(self, n: int, x: Tensor, cu: Any, other: Tensor) -> Tensor:
        y = self.project[n](self.norms[n](x)).view(len(x), 3, HEADS, HEAD_DIM)
        q, k, v = (t.squeeze(1) for t in y.split(1, 1))
        out = self.out[n](self.attend(q, k, v, cu, other).flatten(1))
        return x + nn.functional.silu(out) * 0.5

    def forward(self, x: Tensor, cu_seqlens: Tensor, other: Tensor) -> Tensor:
        cu: Any = LISTED if self.form == "listed" else cu_seqlens
        natural, x = x, wrap_maybe_shuffle(x, cu)
        if self.form == "twice":
            x = wrap_maybe_shuffle(x, cu)
        if self.form == "convolution":
            x = self.conv(x.T[None])[0].T
        if self.form == "products":
            x = (x @ x.transpose(0, 1)).softmax(-1) @ x
        if self.form == "unknown op":
            x = torch.renorm(x, 2, 1, 1.0)
        if self.form == "natural operand":
            x = x + natural
        for n in range(self.layers):
            x = self.layer(n, x, cu, other)
        if self.form == "mean":  # the same in any order
            return x.square().mean()
        if self.form == "returned":
            return x
        x = wrap_maybe_unshuffle(x, other if self.form == "unshuffled by others" else cu)
        weight = torch.arange(x.numel(), dtype=x.dtype, device=x.device).cos().view(x.shape)
        return (x * weight).sum()


class ShuffledToLayout(Shuffling):
    """The same, dense and with :func:`wrap_shuffle_func`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu: Any, other: Tensor) -> Tensor:
        q, k, v = q[None], k[None], v[None]
        match self.form:
            case "to zigzag, zigzag attention":
                return wrap_zigzag_attn_func(q, k, v, causal=True)[0]
            case "to zigzag, masked":
                return wrap_masked_attn_func(q, k, v, self.mask)[0]
            case "to zigzag, own layout":
                layout = Layout.zigzag(LENGTH, 2)
                return wrap_ring_attn_func(q, k, v, causal=True, layout=layout)[0]
            case "to zigzag, documents":
                return wrap_ring_attn_varlen_func(q[0], k[0], v[0], cu, cu, causal=True)
        if self.form == "to zigzag, rolled there":
            v = wrap_roll_func(v, -3, "zigzag")
        if self.form == "to zigzag, rolled in order":
            v = wrap_roll_func(v, -3)
        return wrap_ring_attn_func(q, k, v, causal=True)[0]

    def forward(self, x: Tensor, cu_seqlens: Tensor, other: Tensor) -> Tensor:
        there, back = wrap_shuffle_func, wrap_unshuffle_func
        if self.form == "to zigzag, sharded":
            there, back = wrap_shard_func, wrap_unshard_func
        kind: Any = "striped" if self.form == "to striped" else "zigzag"
        x = there(x[None], kind)[0]
        for n in range(self.layers):
            x = self.layer(n, x, cu_seqlens, other)
        weight = torch.arange(x.numel(), dtype=x.dtype, device=x.device).cos().view(x.shape)
        if self.form == "to zigzag, natural labels":
            return (x * weight).sum()
        if self.form == "to zigzag, returned":
            return {"hidden": x}
        return (back(x[None], kind)[0] * weight).sum()


def model_of(form: str) -> nn.Module:
    """The model of a form."""
    return (ShuffledToLayout if form.startswith("to ") else Shuffling)(form)


def inputs(seed: int = 1) -> dict[str, Tensor]:
    """Documents of lengths that differ with the seed."""
    g = torch.Generator().manual_seed(seed)
    cu, other = ([0, 8, 24], [0, 16, 24]) if seed == 1 else ([0, 16, 24], [0, 8, 24])
    return {
        "x": torch.randn(LENGTH, DIM, dtype=torch.float64, generator=g),
        "cu_seqlens": torch.tensor(cu, dtype=torch.int32),
        "other": torch.tensor(other, dtype=torch.int32),
    }


def step(
    form: str, policy: Any, seed: int = 1, settings: Any = None, lowered: bool = False
) -> tuple[float, dict[str, Tensor], str]:
    """Loss, gradients and the plan's text over all ranks; planned for the documents of seed 1."""
    config = over_all(pas_config=settings or {})
    parallel = parallelize(model_of(form), inputs(), policy, config, lowered=lowered)
    return *steps.step(parallel, inputs(seed)), str(parallel.plan)


def given_back() -> tuple[float, float]:
    """The loss by a plan, and by the same plan given back."""
    first = parallelize(Shuffling("mean"), inputs(), "cp", over_all(), lowered=False)
    second = parallelize(Shuffling("mean"), inputs(), first.plan, over_all(), lowered=False)
    return first(**inputs()).item(), second(**inputs()).item()


def refused(form: str) -> str:
    """What is said of a model that mixes tokens of different orders."""
    return refusal(parallelize, model_of(form), inputs(), "cp", over_all())
