"""What plans save over slow links in which rows and keys both move, as simulated; needs no GPU.

    python examples/benchmark/parts/planning/tiles.py
    python examples/benchmark/parts/planning/tiles.py --tokens 1024 --held 16

A causal sequence in zigzag order over hosts of 8 GPUs, bf16, heads of 128. Shows the milliseconds
of a forward and a backward for the best plan in which holders of rows compute them, and for the
plan that the ops make; and where rows move too, in how many blocks the ranks are.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

if __name__ == "__main__":  # also runs from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[4]))
    sys.path.insert(1, str(Path(__file__).parents[3]))

from benchmark.show.text import markdown

from customized_ops.ring_attention import AttnMask, Layout, make_plan
from customized_ops.ring_attention.core.plan import Plan
from customized_ops.ring_attention.core.plan.cost_model import HELD_SHARDS, CostModel
from customized_ops.ring_attention.core.topology import Topology

OF_HOST = 8


def planned(
    ranks: int, tokens: int, heads: tuple[int, int], costs: CostModel, assignment: str
) -> Plan:
    """The plan for ``tokens`` a rank."""
    mask, layout = AttnMask.causal(ranks * tokens), Layout.zigzag(ranks * tokens, ranks)
    given = {"heads": heads, "team_size": None, "costs": costs, "assignment": assignment}
    return make_plan(mask, layout, **given)


def compared(ranks: int, tokens: int, heads: tuple[int, int], between: float, held: float) -> str:
    """Milliseconds of both plans, and the blocks of the second, if it has some."""
    hosts = CostModel.over(Topology((OF_HOST,) * (ranks // OF_HOST)))
    costs = hosts.with_rates(f"between_bytes={between}e9,held_shards={held}", "--between, --held")
    owners, chosen = (planned(ranks, tokens, heads, costs, how) for how in ("owner", "auto"))
    before, after = (1e3 * plan.simulate().seconds for plan in (owners, chosen))
    text = f"{before:.4g}, {after:.4g} in {chosen.blocks}"
    return text if chosen.blocks > 1 else f"{after:.4g}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 2048, 8192], help="a GPU")
    parser.add_argument("--heads", default="32:32", help="query and key heads")
    parser.add_argument("--between", nargs="+", type=float, default=[50, 25, 12.5], help="GB/s")
    parser.add_argument("--held", type=float, default=HELD_SHARDS, help="shards of others' tokens")
    return parser.parse_args(arguments)


def main() -> None:
    given = parse()
    q_heads, kv_heads = map(int, given.heads.split(":"))
    lines = []
    cases = len(given.ranks) * len(given.tokens) * len(given.between)
    bar = tqdm(total=cases, leave=False, disable=None)
    for ranks in given.ranks:
        for tokens in given.tokens:
            cells = []
            for between in given.between:
                cells.append(compared(ranks, tokens, (q_heads, kv_heads), between, given.held))
                bar.update()
            lines.append([str(ranks), str(tokens), *cells])
    bar.close()
    rates = [f"{between:g} GB/s" for between in given.between]
    print(markdown(("GPUs", "tokens a GPU", *rates), lines, 2))


if __name__ == "__main__":
    main()
