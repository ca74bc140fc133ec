"""Small models that differ in what they do along the sequence, and jobs that run them cut."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from rank_groups import device
from steps import gradients, over_all, received_bytes
from torch import Tensor, nn

from annotations import parallelize
from annotations.engines.torch import EnginePlan
from customized_ops.ring_attention import (
    AttnMask,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
)

DIM, HEADS, HEAD_DIM, VOCAB = 8, 2, 4, 16
LAYERS = {"plain": 2, "masks": 3, "cross": 2}
DOCUMENTS = [0, 3, 4, 12, 18]
SEED = 7  # of the generator before a step


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE: x [b, l, h, d], positions [b or 1, l]."""
    angles = (positions[..., None] * x.new_tensor([1.0, 0.3]))[:, :, None]
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.form, self.layer = model.form, layer
        self.norm = nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, (HEADS + 2) * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM)
        self.up = nn.Linear(DIM, DIM)
        self.drop = nn.Dropout(0.3 if self.form == "dropout" else 0.0)
        if self.form == "convolution":
            self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.mask = AttnMask.prefix_lm(model.length, 3)
        self.slopes: Tensor
        self.register_buffer("slopes", torch.linspace(0.1, 0.4, HEADS))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        match self.form, self.layer:
            case "masks", 0:
                options: Any = {"dropout_p": 0.3, "dropout_seed": 5, "alibi_slopes": self.slopes}
                return wrap_ring_attn_func(q, k, v, **options)
            case "masks", 1:
                return wrap_sliding_window_attn_func(q, k, v, window_size=(4, 0))
            case "masks", 2:
                return wrap_masked_attn_func(q, k, v, self.mask)
            case "documents", _:
                q, k, v = (t.squeeze(0) for t in (q, k, v))
                cu = torch.tensor(DOCUMENTS, dtype=torch.int32)
                return wrap_ring_attn_varlen_func(q, k, v, cu, cu, causal=True)[None]
        return wrap_ring_attn_func(q, k, v)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        b, length, _ = x.shape
        y = self.norm(x)
        if self.form == "convolution":
            y = self.conv(y.transpose(1, 2)).transpose(1, 2)
        if self.form == "masks":  # the tokens of all batch entries in one dim
            y = y.view(b * length, DIM)
        y = self.qkv(y).view(b, length, HEADS + 2, HEAD_DIM)
        q, k, v = y.split([HEADS, 1, 1], 2)
        out = self.attend(rotate(q, positions), rotate(k, positions), v)
        x = x + self.drop(self.out(out.reshape(b, length, -1)))
        return x + F.silu(self.up(x))


class Cross(nn.Module):
    """Every token of the decoder attends every token of the encoder."""

    def __init__(self, length: int, other: int) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(DIM, HEADS * HEAD_DIM), nn.Linear(DIM, 2 * HEAD_DIM)
        self.out, self.mask = nn.Linear(HEADS * HEAD_DIM, DIM), AttnMask.dense(length, other)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, HEAD_DIM))
        k, v = self.kv(encoded).unflatten(-1, (2, 1, HEAD_DIM)).unbind(2)
        return x + self.out(wrap_masked_attn_func(q, k, v, self.mask).flatten(2))


class Model(nn.Module):
    """A decoder; ``form`` says in what it differs from the plainest, or how it takes its loss."""

    def __init__(self, form: str, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.length = form, length
        self.embed = nn.Embedding(VOCAB, DIM)
        self.places = nn.Embedding(length, DIM) if form == "positions" else None
        self.blocks = nn.ModuleList(Block(self, n) for n in range(LAYERS.get(form, 1)))
        if form == "cross":
            self.encoder, self.cross = nn.Linear(DIM, DIM), Cross(length, 5)
        self.norm = nn.LayerNorm(DIM)
        self.double()

    def positions(self, tokens: Tensor, given: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if self.form == "positions":
            return places + given + (given > 2).long().cumsum(-1) - 1
        return places

    def forward(self, tokens: Tensor, labels: Tensor, given: Tensor) -> Any:
        x = self.embed(tokens)
        positions = self.positions(tokens, given)
        if self.places is not None:
            x = x + self.places.weight + self.places(positions % self.length)
        if self.form == "cross":
            encoded = self.encoder(self.embed(given[:, :5]))
        for block in self.blocks:
            x = block(x, positions)
            if self.form == "cross":
                x = self.cross(x, encoded)
        return self.ending(self.norm(x), labels)

    def ending(self, x: Tensor, labels: Tensor) -> Any:
        weight = self.embed.weight
        logits = F.linear(x, weight)
        if self.form == "logits returned":
            return logits, logits.square().sum()
        if self.form != "losses":
            return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))
        rolled = torch.roll(labels, -1, 1)
        rolled[:, -1] = -100
        padded = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        counts = (labels > 5).to(logits.dtype)
        return (
            entropy(logits[:, :-1].contiguous(), labels[:, 1:].contiguous(), ignore_index=3),
            entropy(logits[..., 1:-2, :].float().double(), labels[..., 3:]),
            entropy(F.linear(x[:, :-1], weight), labels[:, 1:]),
            F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="sum"),
            entropy(logits, rolled),
            entropy(logits, padded),
            (logits.mean(1) * labels[:, :1]).sum(),
            logits.amax(1).sum() + logits.max(),
            ((logits * counts[..., None]).sum(1) / counts.sum(1, True)).square().sum(),
        )


def entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), **options)


# Each form, and what is permuted: to the order, and back.
PLAIN = ["tokens", "labels", "arange"]
FORMS: dict[str, tuple[list[str], list[str]]] = {
    "plain": (PLAIN, []),
    "positions": (["tokens", "labels", "add", "p_places_weight"], []),
    "losses": (
        ["tokens", "arange", *["constant_pad_nd"] * 4, "select_scatter", "slice", "labels"],
        [],
    ),
    "logits returned": (["tokens", "arange"], ["linear"]),
    "masks": (PLAIN, []),
    "documents": (PLAIN, []),
    "cross": (PLAIN, []),
}


def inputs(form: str, length: int) -> dict[str, Tensor]:
    """Integers, of which none is what another is."""
    g = torch.Generator().manual_seed(1)
    batch = 1 if form == "documents" else 2
    tokens, labels = torch.randint(VOCAB, (2, batch, length), generator=g)
    return {"tokens": tokens, "labels": labels, "given": (7 * labels + tokens) % VOCAB}


def scalar(result: Any) -> Tensor:
    """What to differentiate: all that a model returns, no two results or entries alike."""
    results = [result] if isinstance(result, Tensor) else list(result)
    total = results[0].new_zeros(())
    for n, each in enumerate(results):
        weight = torch.arange(each.numel(), dtype=each.dtype, device=each.device) + n
        total = total + (each * weight.cos().view(each.shape)).sum()
    return total


def step(
    form: str, length: int, settings: dict[str, Any], policy: Any = "cp"
) -> tuple[float, dict[str, Tensor], str, tuple[int, int], tuple[int, int]]:
    """Over all ranks: loss, gradients after sync, the plan's text, and the bytes that the attention
    ops of all layers, and tokens between two orders, received, counted and planned: forward and
    backward."""
    given = {name: t.to(device()) for name, t in inputs(form, length).items()}
    model, config = Model(form, length).to(device()), over_all(pas_config=settings)
    parallel = parallelize(model, given, policy, config, lowered=form == "losses")
    torch.manual_seed(SEED)
    before = received_bytes()
    loss = scalar(parallel(**given))
    between = received_bytes()
    loss.backward()
    counted = between - before, received_bytes() - between
    calls = ("wrap_", "to_order")
    attends = [r.op.startswith(calls) and r.split != "-" for r, _ in parallel.plan.rows]
    rows = list(itertools.compress(parallel.plan.rows, attends))
    planned = (
        sum(row.forward_bytes * n for row, n in rows),
        sum(row.backward_bytes * n for row, n in rows),
    )
    parallel.sync_grad()
    return loss.item(), gradients(parallel), str(parallel.plan), counted, planned


def given_back(form: str, length: int, settings: dict[str, Any]) -> tuple[str, str]:
    """A plan as text, and that of a module which was given it, whose loss is checked."""
    given = {name: t.to(device()) for name, t in inputs(form, length).items()}

    def make(policy: Any, told: dict[str, Any]) -> Any:
        config = over_all(pas_config=told)
        return parallelize(Model(form, length).to(device()), given, policy, config, lowered=False)

    first = make("cp", settings)
    text = first.plan.to_json()
    second = make(EnginePlan.from_json(text), {})
    assert abs(scalar(first(**given)) - scalar(second(**given))) < 1e-12
    return text, second.plan.to_json()
