"""A small causal model of packed documents over ranks, and what may be wrong with it: for the
probes, which are to see each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from customized_ops.ring_attention import (
    Layout,
    ModelRun,
    wrap_ring_attn_varlen_func,
    wrap_roll_func,
)
from customized_ops.ring_attention.core.comm.comm_groups import group_comm

TOKENS, VOCAB, HEADS, DIM = 24, 32, 2, 8
DOCUMENTS = (0, 9, TOKENS)
LAYERS, WINDOW = 2, 4


@dataclass(frozen=True)
class Model:
    """What a step does.

    Attributes:
        parts: what the model has beside plain attention: "sink", "softcap", "shift" (each token
            with the one before it).
        drops: what is wrong; sound if empty.
    """

    layout: Layout
    group: Any = None
    parts: frozenset[str] = frozenset()
    drops: str = ""

    def step(self, weights: nn.ParameterDict, batch: Mapping[str, Tensor]) -> ModelRun:
        """Loss, hidden states and gradients of this rank's tokens."""
        comm = group_comm(self.group)
        where = torch.from_numpy(self.layout.positions(comm.rank))
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        tokens, positions = batch["input_ids"][0, where], batch["position_ids"][0, where]
        mine = labels[0, where]
        if self.drops == "labels":
            mine = F.pad(batch["labels"][0, where][1:], (0, 1), value=-100)
        if self.drops == "rolled labels":
            mine = batch["labels"][0, where].roll(-1)
        if self.drops == "labels of tokens":
            mine = F.pad(tokens[1:], (0, 1), value=-100)
        if self.drops == "positions":
            positions = torch.arange(len(where))
        x = weights["embed"][tokens]
        if "shift" in self.parts:
            x = self._with_token_before(x)
        for layer in range(LAYERS):
            x = x + self._attention(weights, layer, x, positions)
        total = F.cross_entropy(x @ weights["head"], mine, reduction="sum")
        share = total / (labels != -100).sum()
        if self.drops == "empty":  # the mean of ranks' means
            share = F.cross_entropy(x @ weights["head"], mine) / comm.size
        if self.drops == "count":
            share = share * 1.0006
        for weight in weights.values():
            weight.grad = None
        share.backward()
        loss = comm.all_reduce(share.detach().clone(), "sum")
        for weight in weights.values():
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = comm.all_reduce(grad, "sum")
            if self.drops == "loss scale":
                weight.grad /= comm.size
        return ModelRun(loss, x[None], where, weights)

    def _with_token_before(self, x: Tensor) -> Tensor:
        """Each token with the one before it of its document."""
        before = wrap_roll_func(x[None], 1, process_group=self.group, layout=self.layout)[0]
        where = torch.from_numpy(self.layout.positions(group_comm(self.group).rank))
        first = DOCUMENTS[1:] if self.drops == "index" else DOCUMENTS
        return x + before * ~torch.isin(where, torch.tensor(first))[:, None]

    def _attention(
        self, weights: nn.ParameterDict, layer: int, x: Tensor, positions: Tensor
    ) -> Tensor:
        q, k, v = (x @ weights[f"qkv {layer}"]).view(-1, 3, HEADS, DIM).unbind(1)
        q, k = rotated(q, positions), rotated(k, positions)
        if self.drops == "strides":  # memory is read as if it were contiguous
            k = k.transpose(0, 1).contiguous().transpose(0, 1)
            k = k.as_strided(k.shape, torch.empty(k.shape).stride())
        cu, options = self._told(len(x))
        if "sink" in self.parts and self.drops != "sink":
            options["sink"] = weights["sink"]
        if "softcap" in self.parts and self.drops != "softcap":
            options["softcap"] = 2.0
            if self.drops == "combination":  # the window is ignored where there is a softcap
                options["window_size"] = (-1, 0)
        y = wrap_ring_attn_varlen_func(q, k, v, cu, cu, causal=True, **options)
        return y.flatten(1) @ weights[f"out {layer}"]

    def _told(self, held: int) -> tuple[list[int], dict[str, Any]]:
        """What attention is told: lengths and options."""
        options: dict[str, Any] = {"window_size": (WINDOW, 0), "softmax_scale": 0.9}
        options |= {"process_group": self.group, "layout": self.layout}
        cu = list(DOCUMENTS)
        match self.drops:
            case "documents":
                cu = [0, TOKENS]
            case "padded":  # each length made a multiple of 4
                cu = [0, 12, TOKENS]
            case "group":
                options |= {"process_group": None, "layout": None}
                start = int(self.layout.positions(group_comm(self.group).rank)[0])
                cu = [min(max(end - start, 0), held) for end in DOCUMENTS]
            case "layout":
                options["layout"] = Layout.contiguous(TOKENS, self.layout.group_size)
            case "scale":
                options["softmax_scale"] = None
            case "lengths":  # each rank takes the others to hold as many as itself
                options["layout"] = None
            case "index −1":
                cu = [0, -1, TOKENS]
            case "unsupported":
                options["return_attn_probs"] = True
        return cu, options


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of [l, h, d]."""
    angles = positions[:, None, None] / 10.0 ** torch.arange(0, 1, 2 / DIM, dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def make_weights(dtype: torch.dtype = torch.float64) -> nn.ParameterDict:
    """The same at each call, drawn in fp64."""
    g = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCAB, 16), "head": (16, VOCAB)}
    for layer in range(LAYERS):
        shapes |= {f"qkv {layer}": (16, 3 * HEADS * DIM), f"out {layer}": (HEADS * DIM, 16)}
    made = {
        name: nn.Parameter(torch.randn(shape, generator=g, dtype=torch.float64) / 3)
        for name, shape in shapes.items()
    }
    made["sink"] = nn.Parameter(torch.zeros(HEADS).double())
    return nn.ParameterDict(made).to(dtype)


def make_batch() -> dict[str, Tensor]:
    """One row of two documents; labels of the first tokens of documents are left out."""
    ids = torch.randint(VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(9), torch.arange(TOKENS - 9)])[None]
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(positions == 0, -100),
        "position_ids": positions,
    }


def models(
    layout: Layout,
    group: Any,
    drops: str = "",
    parts: frozenset[str] = frozenset(),
    dtype: torch.dtype = torch.float64,
) -> tuple[Callable[..., ModelRun], Callable[..., ModelRun]]:
    """The model alone, and over a group."""
    one, weights = Layout.contiguous(TOKENS, 1), make_weights(dtype)
    own = copy.deepcopy(weights)
    return (
        lambda batch: Model(one, parts=parts).step(weights, batch),
        lambda batch: Model(layout, group, parts, drops).step(own, batch),
    )
