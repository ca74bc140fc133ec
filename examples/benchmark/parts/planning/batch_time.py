"""What a kernel call, with the batch of messages that it needs, takes the host.

    SEQSHARD_HOSTS=2x2 torchrun --nproc-per-node 4 examples/benchmark/parts/planning/batch_time.py
    torchrun --nproc-per-node 2 examples/benchmark/parts/planning/batch_time.py --device cpu

Passes over packed documents are run with their keys in 1 to 8 groups of heads. A group more is a
call and a batch of messages more in the forward, and a call and two batches in the backward. There
are few tokens, so that the host is busy for longer than the GPU. Passes are run as Python makes
them, and replayed from tapes. Times are microseconds of the host, medians over the rounds and then
over the ranks, without autograd.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from tqdm import tqdm

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[4]))
    sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmark.cases import Maker
from benchmark.ops import recommended
from benchmark.ranks import Ranks

from customized_ops.ring_attention import make_plan
from customized_ops.ring_attention.core.comm.comm_groups import group_comm
from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    BackwardOperands,
    ForwardOperands,
    Scoring,
)
from customized_ops.ring_attention.core.run.executor import attention_backward, attention_forward
from customized_ops.ring_attention.core.run.replays.replay import replay
from customized_ops.ring_attention.core.run.replays.seen_before import SEEN_BEFORE

HEADS, DIM = (32, 8), 128
GROUPS = 1, 2, 4, 8
ROUNDS, CALLS = 5, 20

Pass = Callable[[], object]


def passes(groups: int, tokens: int, ranks: Ranks) -> tuple[Pass, Pass]:
    """A forward and a backward of ``tokens`` a rank, with keys in so many groups of heads."""
    comm = group_comm(ranks.group)
    case = Maker(HEADS, DIM, 0, document_multiple=1).of("packed", ranks.size * tokens)
    layout = recommended(case, ranks.size, comm.costs.topology)
    how = {"assignment": "owner", "team_size": 1, "stages": 1, "head_groups": groups}
    plan = make_plan(case.mask, layout, heads=HEADS, costs=comm.costs, **how)
    dtype = torch.bfloat16 if ranks.cuda else torch.float32
    kernel, scoring = KERNELS["flash4" if ranks.cuda else "torch"], Scoring(DIM**-0.5)
    q, k, v = (
        torch.randn(1, layout.sizes[ranks.rank], n, DIM, dtype=dtype, device=ranks.device)
        for n in (HEADS[0], HEADS[1], HEADS[1])
    )

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return attention_forward(plan, comm, kernel, ForwardOperands(q, k, v), scoring)

    out, lse = forward()
    given = BackwardOperands(torch.randn_like(out), q, k, v, out, lse)
    return forward, lambda: attention_backward(plan, comm, kernel, given, scoring)


def host_time(run: Pass, ranks: Ranks) -> float:
    """Microseconds of the host for one of several passes in a row."""
    found = []
    for _ in range(ROUNDS):
        ranks.together()
        ranks.wait()
        began = perf_counter()
        for _ in range(CALLS):
            run()
        found.append(1e6 * (perf_counter() - began) / CALLS)
    ranks.wait()
    return median(ranks.gather(median(found)))


def measured(groups: int, given: argparse.Namespace, ranks: Ranks) -> Iterator[float]:
    """Forward and backward as Python makes them, and then replayed."""
    both = passes(groups, given.tokens, ranks)
    for enabled in (False, True):
        with replay(enabled):
            for run in both:
                for _ in range(SEEN_BEFORE + 2 if enabled else 2):
                    run()
            yield from (host_time(run, ranks) for run in both)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, and print a line for each number of groups and one for a group more."""
    given = parse()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks = Ranks(given.device)
    say = tqdm.write if ranks.rank == 0 else lambda _: None
    say("groups of heads    forward  backward  replayed forward  backward")
    rows = []
    for groups in tqdm(GROUPS, desc="groups of heads", disable=ranks.rank > 0 or None):
        rows.append(list(measured(groups, given, ranks)))
        say(f"{groups:>15}" + "".join(f"{us:>11.0f}" for us in rows[-1]))
    more = [
        (last - first) / (GROUPS[-1] - 1) for first, last in zip(rows[0], rows[-1], strict=True)
    ]
    say(f"{'one more':>15}" + "".join(f"{us:>11.0f}" for us in more))
    ranks.close()


if __name__ == "__main__":
    main()
