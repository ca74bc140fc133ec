"""Policy gradients over rollouts of changing lengths, their tokens cut over several processes.

Each step packs the rollouts it gets, without padding. The model runs on each rank's tokens;
``wrap_unshard_func`` then puts the log-probs of all tokens, in order, on every rank, so rewards,
advantages and a loss for each rollout are written as on one device. Every rank computes the same
loss, which is divided by the number of ranks, and gradients are added up. Shows that log-probs,
losses and weights are those of one process.

    python examples/rl_rollouts.py                          2 processes
    python examples/rl_rollouts.py --nproc 3 --layout contiguous
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from shared.launch import count, on_ranks, verdict
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from customized_ops.ring_attention import wrap_unshard_func
from customized_ops.ring_attention.api import transformers as seqshard

VOCABULARY, CLIP = 64, 0.2


@dataclass(frozen=True)
class Rollouts:
    """Prompts with their responses, one after the other.

    Attributes:
        tokens, position_ids: int64[1, l]; position_ids restart with each rollout.
        next_tokens: int64[1, l]; a rollout's last token has none, and its entry is unused.
        rollout: int64[l], the number of the rollout of each token.
        learnt: bool[l], whether the token's next one is part of a response.
        advantages: float64[rollouts].
    """

    tokens: Tensor
    position_ids: Tensor
    next_tokens: Tensor
    rollout: Tensor
    learnt: Tensor
    advantages: Tensor


def draw_rollouts(step: int, number: int) -> Rollouts:
    """What an inference engine and a reward would return: the same on every rank."""
    draw = torch.Generator().manual_seed(step)
    prompts = torch.randint(3, 20, (number,), generator=draw)
    lengths = prompts + torch.randint(1, 60, (number,), generator=draw)
    tokens = torch.randint(VOCABULARY, (1, int(lengths.sum())), generator=draw)
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
    rollout = torch.arange(number).repeat_interleave(lengths)
    learnt = (positions >= prompts[rollout] - 1) & (positions < lengths[rollout] - 1)
    rewards = torch.rand(number, generator=draw, dtype=torch.float64)
    advantages = (rewards - rewards.mean()) / rewards.std()
    return Rollouts(tokens, positions[None], tokens.roll(-1, 1), rollout, learnt, advantages)


def log_probs(
    model: LlamaForCausalLM, rollouts: Rollouts, group: dist.ProcessGroup | None, layout: str
) -> Tensor:
    """[l], the log-prob of each token's next one, on every rank; its gradients from all ranks are
    added up."""
    batch = {"input_ids": rollouts.tokens, "position_ids": rollouts.position_ids}
    shard = seqshard.shard_batch(batch, group, layout)
    with shard.context():
        logits = model(**shard.inputs).logits
    rank = 0 if group is None else dist.get_rank(group)
    chosen = shard.layout.shard(rollouts.next_tokens, rank)
    own = logits.log_softmax(-1).gather(-1, chosen[..., None])[..., 0]
    return wrap_unshard_func(own, shard.layout, group)[0]


def loss_of(new: Tensor, old: Tensor, rollouts: Rollouts) -> Tensor:
    """The mean over rollouts of their clipped losses, each of which is a mean over the response."""
    ratio = (new - old).exp()
    gain = rollouts.advantages[rollouts.rollout]
    by_token = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    kept = rollouts.learnt.to(by_token.dtype)
    sums = torch.zeros_like(rollouts.advantages).index_add(0, rollouts.rollout, by_token * kept)
    counts = torch.zeros_like(sums).index_add(0, rollouts.rollout, kept)
    return (sums / counts).mean()


def train(group: dist.ProcessGroup | None, given: argparse.Namespace) -> tuple[list, ...]:
    """Losses and old log-probs of all updates, and the weights after them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="seqshard")).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ranks = 1 if group is None else dist.get_world_size(group)
    losses, found = [], []
    for step in range(given.steps):
        rollouts = draw_rollouts(step, given.rollouts)
        with torch.no_grad():
            old = log_probs(model, rollouts, group, given.layout)
        found.append(old)
        for _ in range(2):  # updates with the same rollouts
            loss = loss_of(log_probs(model, rollouts, group, given.layout), old, rollouts)
            optimizer.zero_grad()
            (loss / ranks).backward()  # the same loss on each
            seqshard.sum_gradients(model, group)
            optimizer.step()
            losses.append(loss.detach())
    return losses, found, [p.detach() for p in model.parameters()]


def main(given: argparse.Namespace, device: torch.device) -> int:
    """Run on every rank; returns 0 if log-probs, losses and weights are those of one process."""
    seqshard.register()
    cut, alone = train(dist.group.WORLD, given), train(None, given)
    if dist.get_rank() == 0:
        ranks, shown = dist.get_world_size(), [round(x.item(), 4) for x in cut[0]]
        print(f"{[len(old) for old in cut[1]]} tokens; losses over {ranks} ranks: {shown}")
    failed = 0
    for what, ours, theirs in zip(("losses", "log-probs", "weights"), cut, alone, strict=True):
        pairs = zip(ours, theirs, strict=True)
        difference = max((a - b).abs().max().item() for a, b in pairs)
        failed |= verdict(f"{what} are those of one process", difference, 1e-10)
    return failed


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=count, default=2, help="processes to cut the tokens over")
    parser.add_argument("--layout", choices=("zigzag", "contiguous", "striped"), default="zigzag")
    parser.add_argument("--rollouts", type=count, default=6, help="of a step; at least 2")
    parser.add_argument("--steps", type=count, default=3)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    on_ranks(lambda device: main(options, device), options.nproc, gpus=False)
