"""A policy-gradient step on rollouts that share prompts: packed as a prefix tree, and apart.

Several answers are drawn for each prompt, as in GRPO (Shao et al., arXiv:2402.03300), here at
random. In a tree, a prompt is computed once for all its answers; apart, rollouts are packed
documents. Shows that gradients are those of each rollout alone, and what the tree saves.

    python examples/rl_prefix_trees.py              2 processes
    python examples/rl_prefix_trees.py --large      2 GPUs, a prompt of 8k, 8 answers of 2k, bf16
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared.launch import count, on_ranks, verdict
from shared.llama import Llama, LlamaConfig
from torch import Tensor

from customized_ops import ring_attention as ring
from customized_ops.ring_attention import wrap_masked_attn_func

SMALL = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 176}
LARGE = {"dim": 2048, "layers": 8, "heads": 16, "kv_heads": 8, "hidden": 5632, "checkpoint": True}
NUMBERS = {"ranks": 2, "steps": 4, "prompts": 2, "answers": 8, "prompt": 192, "answer": 48}
LARGE_ROLLOUTS = {"prompts": 1, "answers": 8, "prompt": 8192, "answer": 2048, "spread": 0.0}


class PartAttention:
    """Attention of a rank's part of rollouts; ``part`` is set for each batch."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        where = {"layout": self.part.layout, "process_group": dist.group.WORLD}
        return wrap_masked_attn_func(q, k, v, self.part.mask, **where)


def drawn(given: argparse.Namespace, step: int) -> tuple[list[tuple[Any, int]], Tensor]:
    """Rollouts with the lengths of their prompts, and advantages that reward even tokens."""
    draw, shortest = np.random.default_rng((0, step)), 1 - given.spread
    length = lambda: max(1, round(given.answer * draw.uniform(shortest, 2 - shortest)))  # noqa: E731
    rollouts, advantages = [], []
    for _ in range(given.prompts):
        prompt = draw.integers(0, 256, given.prompt)
        answers = [draw.integers(0, 256, length()) for _ in range(given.answers)]
        rollouts += [(np.concatenate([prompt, answer]), given.prompt) for answer in answers]
        rewards = np.array([(answer % 2 == 0).mean() for answer in answers])
        advantages.append((rewards - rewards.mean()) / (rewards.std() + 1e-6))
    return rollouts, torch.from_numpy(np.concatenate(advantages))


def parts(given: argparse.Namespace, steps: int, share: bool) -> Iterator[ring.RolloutPart]:
    """This rank's part of each step, made while the device computes the step before."""
    size, group = LARGE if given.large else SMALL, dist.group.WORLD
    heads = {"heads": (size["heads"], size["kv_heads"]), "head_dim": size["dim"] // size["heads"]}
    where = {"ranks": group.size(), "rank": group.rank(), "costs": ring.group_costs(group)}
    loader = (drawn(given, step)[0] for step in range(steps))
    return ring.rollout_parts(loader, share=share, **heads, **where)


def policy(given: argparse.Namespace, device: torch.device, attend: Any) -> Llama:
    """The policy, the same at each call."""
    torch.manual_seed(0)
    net = Llama(LlamaConfig(**(LARGE if given.large else SMALL), op=attend))
    frequencies = net.inv_freq.to(device)  # these stay fp32
    net.to(device, torch.bfloat16 if given.large else torch.float64).inv_freq = frequencies
    return net


def over_ranks(net: Llama, part: ring.RolloutPart, advantages: Tensor) -> Tensor:
    """The loss of a step; leaves its gradients."""
    weight = net.embed.weight
    net.c.op.part = part = part.to(weight.device)
    hidden = net.hidden(part.tokens[None], part.positions[None])
    log_probs = part.log_probs(F.linear(hidden, weight))
    loss = part.loss(log_probs, part.of_rollouts(advantages.to(weight.device)), mean="rollout")
    net.zero_grad()
    loss.backward()
    for each in (total := loss.detach().clone(), *(p.grad for p in net.parameters())):
        dist.all_reduce(each)
    return total


def alone(net: Llama, given: argparse.Namespace) -> None:
    """Leaves the gradients of the first step, one rollout at a time, on this rank alone."""
    for (row, prompt), advantage in zip(*drawn(given, 0), strict=True):
        tokens = torch.from_numpy(row).to(net.embed.weight.device)
        positions = torch.arange(len(row), device=tokens.device)
        logits = F.linear(net.hidden(tokens[None], positions[None])[0], net.embed.weight)
        loss = F.cross_entropy(logits[prompt - 1 : -1], tokens[prompt:])
        (advantage * loss / (given.prompts * given.answers)).backward()


def train(share: bool, given: argparse.Namespace, device: torch.device) -> tuple[Tensor, float]:
    """The losses of each step, and the median seconds of a step without the first one."""
    net = policy(given, device, PartAttention())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    losses, ended = [], []
    for step, part in enumerate(parts(given, given.steps + 1, share)):
        losses.append(over_ranks(net, part, drawn(given, step)[1]))
        optimizer.step()
        losses[-1].item()  # waits for the device
        ended.append(time.perf_counter())
    return torch.stack(losses), statistics.median(np.diff(ended).tolist())


def main(given: argparse.Namespace, device: torch.device) -> int:
    """Run on every rank; returns 0 if gradients and losses of the tree are those without it."""
    failed, packed = 0, ring.pack_rollouts(*zip(*drawn(given, 0)[0], strict=True))
    if not given.large:
        tree, one = policy(given, device, PartAttention()), policy(given, device, "ring")
        over_ranks(tree, next(parts(given, 1, True)), drawn(given, 0)[1])
        alone(one, given)
        pairs = zip(tree.parameters(), one.parameters(), strict=True)
        apart = torch.stack([(a.grad - b.grad).abs().max() / b.grad.abs().max() for a, b in pairs])
        failed = verdict("gradients are those of each rollout alone", apart.max().item(), 1e-10)
    (curve, of_tree), (other, of_rollouts) = (train(way, given, device) for way in (True, False))
    if dist.get_rank() == 0:
        print(packed)
        for name, took in (("as a tree", of_tree), ("apart", of_rollouts)):
            print(f"{name:10}{1e3 * took:.1f} ms a step, {len(packed.paths) / took:,.0f} tokens/s")
        print(f"time      {1 - of_tree / of_rollouts:.1%} saved")
    difference, allowed = (curve - other).abs().max().item(), 1e-3 if given.large else 1e-10
    return failed | verdict("the loss curve is that of rollouts apart", difference, allowed)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--large", action="store_true", help="8 answers of 2k tokens to a prompt of 8k")
    for name, value in NUMBERS.items():
        add(f"--{name}", type=count, default=value)
    add("--spread", type=float, default=0.5, help="of the lengths of answers")
    given = parser.parse_args(arguments)
    vars(given).update(LARGE_ROLLOUTS if given.large else {})
    return given


if __name__ == "__main__":
    options = parse()
    on_ranks(lambda device: main(options, device), options.ranks)
