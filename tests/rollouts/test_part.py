"""Log-probs, losses and gradients of packed rollouts, over ranks, against each rollout alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense import assert_same
from shared.llama import Llama, LlamaConfig
from torch import Tensor

from customized_ops.chunk_linear_cross_entropy import chunk_linear_cross_entropy
from customized_ops.ring_attention import Layout, run_ranks, wrap_masked_attn_func
from customized_ops.ring_attention.op.arguments import ArgumentError
from customized_ops.ring_attention.rollouts import PackedRollouts, RolloutPart, pack_rollouts

SIZES = {"dim": 16, "heads": 4, "kv_heads": 2, "hidden": 24, "vocab": 11, "layers": 2}


def rollouts() -> tuple[list[list[int]], list[int]]:
    """Of two prompts, some of which part late, end inside others, are equal or have one token."""
    draw = np.random.default_rng(0)
    row = lambda n: draw.integers(0, SIZES["vocab"], n).tolist()  # noqa: E731
    first, second, answer = row(9), row(5), row(7)
    each = [
        *(first + row(n) for n in (4, 6, 1)),
        first + answer,
        first + answer[:5] + row(3),
        first + answer[:5],
        first + answer,
        first,  # an answer of no token
        second + row(6),
        second + row(2),
        [3],
    ]
    return each, [*[9] * 8, 5, 0, 0]  # the last two have targets in their prompts


EACH, PROMPTS = rollouts()
PACKED = pack_rollouts(EACH, PROMPTS)
ADVANTAGES = torch.linspace(-1, 2, len(EACH), dtype=torch.float64)


torch.manual_seed(0)
INITIAL = Llama(LlamaConfig(**SIZES)).double().state_dict()


def model(attend: Any = "ring") -> Llama:
    """The same at each call, also in a thread."""
    net = Llama(LlamaConfig(**SIZES, op=attend)).double()
    net.load_state_dict(INITIAL)
    return net


def logits_of(net: Llama, tokens: Tensor, positions: Tensor) -> Tensor:
    return F.linear(net.hidden(tokens[None], positions[None])[0], net.embed.weight)


def alone() -> tuple[Llama, list[Tensor]]:
    """Log-probs of the targets of each rollout, computed by itself on one device."""
    net, found = model(), []
    for row, prompt in zip(EACH, PROMPTS, strict=True):
        tokens = torch.tensor(row)
        log_probs = logits_of(net, tokens, torch.arange(len(row))).log_softmax(-1)
        first = max(prompt, 1)
        found.append(log_probs[first - 1 : -1].gather(1, tokens[first:, None])[:, 0])
    return net, found


def policy_loss(mean: str | None) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """A policy-gradient loss of a part, and of log-probs of each rollout."""

    def packed(part: RolloutPart, log_probs: Tensor) -> Tensor:
        return part.loss(log_probs, part.of_rollouts(ADVANTAGES), mean)

    def apart(each: list[Tensor]) -> Tensor:
        sums = torch.stack([a * lp.sum() for a, lp in zip(ADVANTAGES, each, strict=True)])
        counts = torch.tensor([len(lp) for lp in each])
        if mean == "rollout":
            sums = sums / (counts.clamp(min=1) * len(each))
        return -sums.sum() / (counts.sum() if mean == "token" else 1)

    return packed, apart


OLD = torch.randn(len(PACKED.paths), generator=torch.Generator().manual_seed(1)).double() - 2


def clipped_loss() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """PPO's, in which each token of a rollout has the log-prob that it was drawn with."""

    def clipped(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        ratio = (log_probs - old).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()

    def packed(part: RolloutPart, log_probs: Tensor) -> Tensor:
        old, advantages = part.of_tokens(OLD), part.of_rollouts(ADVANTAGES)
        return clipped(part.of_targets(log_probs), old, advantages)

    def apart(each: list[Tensor]) -> Tensor:
        old = OLD.split([len(row) for row in EACH])
        told = [o[len(o) - len(lp) :] for o, lp in zip(old, each, strict=True)]
        losses = [clipped(*of) for of in zip(each, told, ADVANTAGES, strict=True)]
        return torch.stack(losses).sum()

    return packed, apart


LOSSES = {
    "token": policy_loss("token"),
    "rollout": policy_loss("rollout"),
    "sum": policy_loss(None),
    "clipped": clipped_loss(),
}


def on_rank(group: Any, layout: Layout, loss: Callable[..., Tensor]) -> list[Tensor]:
    """The loss, each rollout's log-prob, and gradients of all weights, added up over the ranks."""
    part = PACKED.part(layout, group.rank)

    def attend(q: Tensor, k: Tensor, v: Tensor, _: Any) -> Tensor:
        return wrap_masked_attn_func(
            q, k, v, part.mask, layout=part.layout, process_group=group if group.size > 1 else None
        )

    net = model(attend)
    log_probs = part.log_probs(logits_of(net, part.tokens, part.positions))
    share = loss(part, log_probs)
    share.backward()
    sums = part.sums(part.of_targets(log_probs.detach()))
    return [group.all_reduce(t, "sum") for t in (share.detach(), sums, *gradients(net))]


def gradients(net: Llama) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]


def layout_over(ranks: int) -> Layout:
    return Layout.balanced(PACKED.mask, ranks, chunk=None if ranks < 3 else 4)


@pytest.mark.filterwarnings("ignore:Layout.balanced")  # so few tokens are not even
@pytest.mark.parametrize(
    ("name", "ranks"), [("token", 1), ("token", 2), ("rollout", 3), ("sum", 1), ("clipped", 2)]
)
def test_gradients_are_those_of_rollouts_alone(name: str, ranks: int) -> None:
    packed, apart = LOSSES[name]
    found = run_ranks(ranks, lambda group: on_rank(group, layout_over(ranks), packed))[0]
    net, each = alone()
    loss = apart(each)
    loss.backward()
    wanted = [loss.detach(), torch.stack([lp.detach().sum() for lp in each]), *gradients(net)]
    assert wanted[2].abs().max() > 1e-3
    for n, (got, want) in enumerate(zip(found, wanted, strict=True)):
        assert_same(f"result {n}", got, want)


def test_targets_of_all_ranks_are_those_of_all_rollouts() -> None:
    wanted = [
        (n, p, row[p]) for n, row in enumerate(EACH) for p in range(max(PROMPTS[n], 1), len(row))
    ]
    for ranks in (1, 2, 5):
        layout = Layout.striped(len(PACKED.tokens), ranks, 3)
        found, pairs = [], 0
        for rank in range(ranks):
            part = PACKED.part(layout, rank)
            held = layout.positions(rank)
            assert part.tokens.tolist() == PACKED.tokens[held].tolist()
            step = part.place - torch.from_numpy(PACKED.bounds)[part.rollout]
            found += zip(
                part.rollout.tolist(),
                step.tolist(),
                part.targets[part.pair].tolist(),
                strict=True,
            )
            # At the row of the token before, whose position is one less.
            assert torch.equal(part.positions[part.rows][part.pair], step - 1)
            pairs += len(part.rows)
        assert sorted(found) == wanted
        assert part.target_counts.tolist() == [
            sum(n == other for other, _, _ in wanted) for n in range(len(EACH))
        ]
        assert pairs < len(wanted), "targets that rollouts share are one pair"


def test_log_probs_by_chunks_of_the_vocabulary() -> None:
    part, net = PACKED.part(), model(lambda q, k, v, _: wrap_masked_attn_func(q, k, v, PACKED.mask))
    hidden = net.hidden(part.tokens[None], part.positions[None])[0]
    losses = chunk_linear_cross_entropy(
        hidden[part.rows], net.embed.weight, part.targets, reduction="none"
    )
    logits = F.linear(hidden, net.embed.weight)
    assert_same("log-probs", -losses.detach(), part.log_probs(logits[None]).detach())
    half = part.log_probs(logits.bfloat16())
    assert half.dtype == torch.float32


def test_weights_of_no_targets() -> None:
    part: RolloutPart = pack_rollouts([[1, 2], [1]], [2, 1]).part()
    loss = part.loss(part.log_probs(torch.zeros(2, 4)), part.of_rollouts(torch.ones(2)))
    assert loss.item() == 0.0


def test_numbers_come_in_lists_too() -> None:
    part = PACKED.part(Layout.striped(len(PACKED.tokens), 2, 3), 1)
    assert len(part.rows) < len(part.place)
    weights = part.of_rollouts(ADVANTAGES)
    log_probs = torch.linspace(-3, -1, len(part.rows), dtype=torch.float64)
    for found, want in (  # a list of floats is fp32
        (part.of_rollouts(ADVANTAGES.tolist()), weights),
        (part.of_rollouts(ADVANTAGES.numpy()), weights),
        (part.of_tokens(OLD.tolist()), part.of_tokens(OLD)),
        (part.weights(weights.tolist()), part.weights(weights)),
        (part.loss(log_probs, weights.tolist()), part.loss(log_probs, weights)),
    ):
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-7, check_dtype=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_pairs_are_the_targets_where_there_are_as_many(ranks: int) -> None:
    """Or what is of pairs would be taken for what is of targets, in another order."""
    packed = pack_rollouts([[5, 9, 2], [5, 1, 7], [3, 4], [5, 1, 6]], [2, 1, 0, 2])
    for rank in range(ranks):
        part: RolloutPart = packed.part(Layout.contiguous(len(packed.tokens), ranks), rank)
        assert part.pair.tolist() == list(range(len(part.place))) != []
        values = torch.arange(len(part.rows))
        assert torch.equal(part.sums(values), part.sums(part.of_targets(values)))


def refused(part: RolloutPart) -> dict[str, Callable[[], Tensor]]:
    logits, one, pairs = torch.zeros(3, 9), torch.ones(1), torch.ones(3)
    of: Any = part  # also given what its types exclude
    return {
        "log_probs: logits must be of the 4 tokens of this rank": lambda: part.log_probs(logits),
        "log_probs: logits must be a tensor of the 4": lambda: of.log_probs(logits.tolist()),
        "log_probs: logits must be of a vocabulary that has the targets, 2 to 4, got (4, 4)": (
            lambda: part.log_probs(torch.zeros(4, 4))
        ),
        "of_rollouts: values must be [2], one for each rollout, got [1]": (
            lambda: part.of_rollouts(one)
        ),
        "of_rollouts: values must be [2], one for each rollout, got [[1], [1, 2]]": (
            lambda: of.of_rollouts([[1], [1, 2]])
        ),
        "of_targets: log_probs must be [3], one for each pair": lambda: part.of_targets(one),
        "of_targets: log_probs must be a tensor, [3]": lambda: of.of_targets([1, 2, 3]),
        "of_tokens: values must be [6], one for each token": lambda: part.of_tokens(one),
        "of_tokens: values must be [6], one for each token of": lambda: of.of_tokens("abcdef"),
        "sums: values must be [4], one for each target of each rollout, as of_targets makes them "
        "of pairs, got [3], as many as there are pairs": lambda: part.sums(pairs),
        "weights: weights must be [4], one for each target": lambda: part.weights(one),
        "weights: mean must be one of ('token', 'rollout', None), got 'all'": (
            lambda: part.weights(torch.ones(4), "all")
        ),
        "loss: log_probs must be [3], one for each pair": lambda: part.loss(one, torch.ones(4)),
        "loss: log_probs must be a tensor": lambda: of.loss([1.0] * 3, torch.ones(4)),
        "loss: weights must be [4], one for": lambda: part.loss(pairs, pairs),
        "loss: weights must be [4], one for each": lambda: of.loss(pairs, None),
    }


@pytest.mark.parametrize("number", range(16))
def test_errors_name_the_argument(number: int) -> None:
    packed: PackedRollouts = pack_rollouts([[1, 2, 3], [1, 2, 4]])
    said, call = list(refused(packed.part()).items())[number]
    with pytest.raises(ArgumentError) as error:
        call()
    assert str(error.value).startswith(f"RolloutPart.{said}")
