"""How much of their kernel's rate plans over many hosts keep, as simulated; needs no GPU.

    python examples/benchmark/parts/planning/many_hosts.py
    python examples/benchmark/parts/planning/many_hosts.py --ranks 64 --between 25 --draws 5
    python examples/benchmark/parts/planning/many_hosts.py --ranks 16 64 256 --held inf
    python examples/benchmark/parts/planning/many_hosts.py --costs call_seconds=1e-4
    python examples/benchmark/parts/planning/many_hosts.py --bound --draws 20

There are 8 GPUs per host and 8k tokens per GPU, bf16, heads of 128. "causal" is one sequence in
zigzag order. "packed" are causal documents with the lengths of a corpus, in the balanced layout:
the median of some draws, and their span. A share is the kernels' seconds, averaged over the ranks,
as a fraction of the seconds of a forward or of a backward. The rest is time in which a rank waits,
merges, or computes more than others. Plans are those that the ops make for these links.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

from tqdm import tqdm

if __name__ == "__main__":  # also runs from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[4]))
    sys.path.insert(1, str(Path(__file__).parents[3]))

from benchmark.cases import K, Maker
from benchmark.ops import plan_of, recommended
from benchmark.show.text import markdown

from customized_ops.ring_attention.core.plan.cost_model import H200, HELD_SHARDS, CostModel
from customized_ops.ring_attention.core.plan.simulate import Timeline
from customized_ops.ring_attention.core.topology import Topology

OF_HOST, TOKENS = 8, 8 * K
HEADS = ((64, 8), (32, 32))


def costs_over(
    ranks: int, between: float, held: float = HELD_SHARDS, others: str = ""
) -> CostModel:
    """The cost model of hosts of 8 ranks; ``between``: GB/s of a rank between hosts; ``held``:
    shards of others' keys that a rank may hold; ``others``: see :meth:`.CostModel.with_rates`."""
    if ranks <= OF_HOST:
        return H200.with_rates(others, "--costs")
    hosts = CostModel.over(Topology((OF_HOST,) * (ranks // OF_HOST)))
    hosts = replace(hosts, between_bytes=between * 1e9, held_shards=held)
    if math.isinf(held):
        hosts = replace(hosts, gathered_bytes=math.inf)
    return hosts.with_rates(others, "--costs")


def simulated(
    kind: str, heads: tuple[int, int], ranks: int, seed: int, costs: CostModel
) -> Timeline:
    """Forward and backward of one draw in time, by the plan for these links."""
    case = Maker(heads, 128, seed, document_multiple=1).of(kind, ranks * TOKENS)
    plan = plan_of(case, recommended(case, ranks, costs.topology), costs)
    return plan.simulate(*heads, costs=costs)


def shares(kind: str, heads: tuple[int, int], ranks: int, draws: int, costs: CostModel) -> str:
    """Shares of the kernel's rate, forward and backward."""
    found = []
    for seed in range(draws if kind == "packed" else 1):
        timeline = simulated(kind, heads, ranks, seed, costs)
        found.append((timeline.forward.kernel_share, timeline.backward.kernel_share))
    passes = [sorted(each) for each in zip(*found, strict=True)]
    text = " / ".join(f"{median(each):.0%}" for each in passes)
    if len(found) == 1:
        return text
    return f"{text} ({' / '.join(f'{each[0]:.0%} to {each[-1]:.0%}' for each in passes)})"


def cost_of_bound(
    kind: str, heads: tuple[int, int], ranks: int, draws: int, costs: CostModel
) -> str:
    """How much longer forward and backward take than if ranks may hold any number of keys."""
    found, free = [], replace(costs, held_shards=math.inf, gathered_bytes=math.inf)
    for seed in range(draws if kind == "packed" else 1):
        bound, not_bound = (
            simulated(kind, heads, ranks, seed, each).seconds for each in (costs, free)
        )
        found.append(bound / not_bound - 1)
    span = f" ({min(found):+.1%} to {max(found):+.1%})" if len(found) > 1 else ""
    return f"{median(found):+.1%}{span}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    every = [8, 16, 32, 64, 128, 256, 512, 1024]
    parser.add_argument("--ranks", nargs="+", type=int, default=every, help="multiples of 8")
    parser.add_argument("--between", nargs="+", type=float, default=[50.0, 25.0], help="GB/s a GPU")
    parser.add_argument("--held", type=float, default=HELD_SHARDS, help="shards of others' keys")
    parser.add_argument("--costs", default="", help="other rates, as batch_seconds=5e-5")
    parser.add_argument("--draws", type=int, default=3, help="of packed documents")
    parser.add_argument(
        "--bound", action="store_true", help="show how much longer passes take with --held"
    )
    given = parser.parse_args(arguments)
    if any(ranks % OF_HOST or ranks < 1 for ranks in given.ranks) or given.draws < 1:
        parser.error("--ranks are multiples of 8, and there is one draw or more")
    try:
        costs_over(2 * OF_HOST, 1.0, others=given.costs)
    except ValueError as error:
        parser.error(str(error))
    return given


def main() -> None:
    given = parse()
    columns = [
        (kind, heads, between)
        for kind in ("causal", "packed")
        for heads in HEADS
        for between in given.between
    ]
    head = [f"{kind} {h}:{g}, {between:g} GB/s" for kind, (h, g), between in columns]
    lines = []
    bar = tqdm(total=len(given.ranks) * len(columns), leave=False, disable=None)
    for ranks in given.ranks:
        cells = [str(ranks)]
        for kind, heads, between in columns:
            costs = costs_over(ranks, between, given.held, given.costs)
            show = cost_of_bound if given.bound else shares
            cells.append(show(kind, heads, ranks, given.draws, costs))
            bar.update()
        lines.append(cells)
    bar.close()
    print(markdown(("GPUs", *head), lines, 1))


if __name__ == "__main__":
    main()
