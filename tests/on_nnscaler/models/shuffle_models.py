"""Models that shuffle their own packed tokens before their first layer, and restore them after."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import nnscaler
import torch
import torch.nn.functional as F
from nnscaler.policies import OpPartition, OpPlan, get_pas_ops
from torch import Tensor, nn

from customized_ops.ring_attention import (
    Layout,
    wrap_maybe_shuffle,
    wrap_maybe_unshuffle,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_roll_func,
    wrap_shuffle_func,
    wrap_streaming_attn_func,
    wrap_unshuffle_func,
    wrap_zigzag_allgather_attn_varlen_func,
)
from customized_ops.ring_attention.ring_attn_varlen import flash_attention_anno

from ..support.jobs import Training
from ..support.policies import place_of

VOCAB, DIM, HEADS, HEAD_DIM, LENGTH = 32, 16, 2, 8, 64
IGNORED = 5  # of the targets
LISTED = [0, 24, LENGTH]
OWN_LAYOUT = Layout.zigzag(LENGTH, 2)


def uncut(x: Tensor) -> Tensor:
    """Through ops that nnscaler runs whole: no order matters to them."""
    y = F.rms_norm(x, (DIM,))
    return torch.expm1(torch.square(y) * 0.1).t().contiguous().t()


def by_generator(x: Tensor) -> Tensor:
    first, second = (half * 2 for half in x.chunk(2, 1))
    return torch.cat([first, second], 1)


def cumulative(x: Tensor) -> Tensor:
    return torch.cumsum(x, 0)


def unbound(x: Tensor) -> Tensor:
    first, second = x.view(LENGTH, 2, DIM // 2).unbind(1)
    return torch.cat([first, second], 1)


def flipped(x: Tensor) -> Tensor:
    return torch.flip(x, (1,))


@nnscaler.register_op("l d, ? -> l d")
def added(x: Tensor, bias: Tensor) -> Tensor:
    """An op that does not say how it goes along its bias."""
    return x + bias


def _emit_attention(node: Any, args: list[str], kwargs: dict[str, str], *_: int) -> str:
    ranks = node.input(0).parent.shape[0] // node.input(0).shape[0]
    group = f"process_group={list(range(ranks))}"
    given = [*args, *(f"{name}={value}" for name, value in kwargs.items())]
    return f"{node.signature}({', '.join([*given, group] if ranks > 1 else given)})"


@nnscaler.register_op(flash_attention_anno, emit_fn=_emit_attention)
def attention_of_a_users_own(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None = None,
    process_group: Any = None,
) -> Tensor:
    return wrap_ring_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, None, causal=True, process_group=process_group
    )


def of_several_results(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return mantissa * exponent


def normalised_as_read(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.size()[1:])


# What becomes of the tokens between the shuffles.
BETWEEN = {
    "uncut": uncut,
    "cumulative": cumulative,
    "unbound": unbound,
    "by a generator": by_generator,
    "flipped": flipped,
    "of several results": of_several_results,
    "normalised as read": normalised_as_read,
}


class Shuffling(nn.Module):
    """``form`` says in what it differs from what is right."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, HEADS * HEAD_DIM) for _ in range(3))
        self.o = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("slopes", torch.tensor([0.25, 0.5]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, other: Tensor) -> Tensor:
        if self.form.startswith("to zigzag"):
            q, k, v = (t.unsqueeze(0) for t in (q, k, v))
            v = wrap_roll_func(v, -3, "zigzag") if "rolled" in self.form else v
            layout = OWN_LAYOUT if "own layout" in self.form else None
            return wrap_ring_attn_func(q, k, v, causal=True, layout=layout).squeeze(0)
        if self.form == "dense":
            q, k, v = (t.unsqueeze(0) for t in (q, k, v))
            return wrap_ring_attn_func(q, k, v, causal=True).squeeze(0)
        if self.form == "attention of a user's own":
            return attention_of_a_users_own(q, k, v, cu, cu, None)
        if self.form == "whole keys":
            k, v = wrap_maybe_unshuffle(k, cu), wrap_maybe_unshuffle(v, cu)
        if self.form == "streaming":
            return wrap_streaming_attn_func(q, k, v, 4, 2, cu_seqlens=cu)
        if self.form == "slopes":
            k, v = wrap_maybe_unshuffle(k, cu), wrap_maybe_unshuffle(v, cu)
            return wrap_zigzag_allgather_attn_varlen_func(q, k, v, cu, cu, self.slopes, causal=True)
        if "whole keys" in self.form:
            return wrap_zigzag_allgather_attn_varlen_func(q, k, v, cu, cu, None, causal=True)
        if self.form == "other documents":
            cu = other
        if self.form == "copied documents":
            cu = cu.clone().to(torch.int64)
        if self.form == "listed documents":
            cu = LISTED
        return wrap_ring_attn_varlen_func(q, k, v, cu, cu, None, causal=True)

    def forward(self, sample: dict[str, Tensor]) -> Any:
        cu, other = sample["cu_seqlens"], sample["other"]
        if self.form == "tokens":
            natural = wrap_maybe_unshuffle(
                self.embedding(wrap_maybe_shuffle(sample["tokens"], cu)), cu
            )
        else:
            natural = self.embedding(sample["tokens"])
        zigzag = self.form.startswith("to zigzag")
        if zigzag:
            x = wrap_shuffle_func(natural.unsqueeze(0), "zigzag").squeeze(0)
        else:
            x = wrap_maybe_shuffle(natural, LISTED if self.form == "listed documents" else cu)
        natural_too = (sample["tokens"] + 1).double().unsqueeze(-1)
        if self.form == "natural by keyword":
            x = torch.atan2(x, other=natural_too)
        if self.form in ("natural, not shown", "short, not shown"):
            x = added(x, torch.tanh(natural if self.form.startswith("natural") else self.slopes[0]))
        if self.form in BETWEEN:
            x = BETWEEN[self.form](x)
        if self.form == "natural labels":
            return F.cross_entropy(self.head(x), sample["targets"])
        if self.form == "natural operand":
            x = x + natural
        for _ in range(2):
            y = self.norm(x)
            sizes = (LENGTH,)
            if self.form == "shapes":
                sizes = y.size()[:-1] if y.dim() == 2 and len(y) == y.shape[0] else ()
            q, k, v = (p(y).view(*sizes, HEADS, HEAD_DIM) for p in (self.q, self.k, self.v))
            out = self.attend(q, k, v, cu, other).reshape(LENGTH, HEADS * HEAD_DIM)
            x = x + F.gelu(self.o(out)) * 0.5
        if self.form == "returned inside":
            return {"states": [x]}
        if self.form == "tokens as classes":
            return F.cross_entropy(x.t(), sample["tokens"][:DIM])
        if self.form == "shuffled labels":
            targets = wrap_maybe_shuffle(sample["targets"], sample["cu_seqlens"])
            return F.cross_entropy(self.head(x), targets, ignore_index=IGNORED)
        if self.form == "natural by keyword":
            x = x + 0 * wrap_maybe_shuffle(natural_too, cu)
        if not zigzag:
            x = wrap_maybe_unshuffle(x, LISTED if self.form == "listed documents" else cu)
        elif "natural labels" not in self.form:
            x = wrap_unshuffle_func(x.unsqueeze(0), "zigzag").squeeze(0)
        return F.cross_entropy(self.head(x), sample["targets"])


def _model(form: str) -> nn.Module:
    torch.manual_seed(0)
    return Shuffling(form).double()


def batch(seed: int) -> dict[str, dict[str, Tensor]]:
    """Three documents, of other lengths in every batch."""
    g = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCAB, (2, LENGTH), generator=g)
    first = 8 + 8 * (seed % 3)
    cu = torch.tensor([0, first, first + 16, LENGTH], dtype=torch.int32)
    other = torch.tensor([0, first + 8, LENGTH], dtype=torch.int32)
    return {"sample": {"tokens": tokens, "targets": targets, "cu_seqlens": cu, "other": other}}


def training(
    form: str = "plain", policy: Any = "cp_follow", plan: int = 2, **further: Any
) -> Training:
    return Training(partial(_model, form), batch, policy, plan, **further)


def cut_only(graph: Any, config: Any, name: str) -> Iterator[Any]:
    """A policy: ours of that name alone are cut on the sequence."""
    for node in get_pas_ops(graph):
        if name in node.name:
            tokens = "lq" if "allgather" in node.name else "l"
            yield OpPlan(node, partition=OpPartition(*place_of(node, tokens)))


def in_two_stages(graph: Any, config: Any) -> Iterator[Any]:
    """A policy: ours are cut on the sequence, and the second layer begins the second stage."""
    norms = 0
    for node in get_pas_ops(graph):
        norms += node.fqn == "norm"
        begins = norms == 2 and node.fqn == "norm"
        ours = "_maybe_" in node.name or "_attn" in node.name
        cut = OpPartition(*place_of(node, "l")) if ours else None
        if cut or begins:
            yield OpPlan(node, partition=cut, stage_id=1 if begins else -1)
