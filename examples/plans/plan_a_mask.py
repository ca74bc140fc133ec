"""Print and draw the plan of a mask, which is given as the call that makes it.

    python examples/plans/plan_a_mask.py "block_causal(8192, 1024)" --layout balanced --ranks 8
    python examples/plans/plan_a_mask.py "varlen([0, 900, 4096], causal=True)" --layout zigzag

The calls are those of AttnMask. Shows that every pair of the mask is computed once, and, for short
sequences, that ranks which follow the plan get what one device gets.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.launch import verdict

from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    Plan,
    make_plan,
    run_ranks,
    wrap_masked_attn_func,
)

MOST_RUN = 2048  # most tokens of a plan that is also run
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")


def mask_of(call: str) -> AttnMask:
    """The mask made by ``call``, a call of a constructor of AttnMask with plain values.

    Raises:
        ValueError: it is not such a call.
    """
    node = ast.parse(call, mode="eval").body
    made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    make = getattr(AttnMask, node.func.id, None) if made else None
    if make is None or node.func.id.startswith("_"):
        raise ValueError(f"{call!r} is no call of a constructor of AttnMask, such as causal(4096)")
    values = [ast.literal_eval(value) for value in node.args]
    mask = make(*values, **{k.arg: ast.literal_eval(k.value) for k in node.keywords})
    if not isinstance(mask, AttnMask) or mask.q_len != mask.k_len:
        raise ValueError(f"{call!r} is no mask of one sequence")
    return mask


def run(plan: Plan) -> float:
    """How far the output of ranks, run as threads, is from that of one device."""
    mask, layout = plan.mask, plan.q_layout
    q, k, v = torch.randn(3, 1, mask.q_len, 2, 8, dtype=torch.float64)

    def rank(group) -> torch.Tensor:
        mine = (layout.shard(t, group.rank) for t in (q, k, v))
        return wrap_masked_attn_func(*mine, mask, process_group=group, layout=layout)

    cut = layout.unshard(run_ranks(layout.group_size, rank))
    return (cut - wrap_masked_attn_func(q, k, v, mask)).abs().max().item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if the plan computes each pair once, and ranks get what one device gets."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    shown = "block_causal(2048, 256)"
    parser.add_argument("mask", nargs="?", default=shown, help="such as %(default)r")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layout", choices=LAYOUTS, default="contiguous")
    parser.add_argument("--png", type=Path, default=Path("plan.png"))
    given = parser.parse_args(arguments)
    try:
        mask = mask_of(given.mask)
        of_mask = mask if given.layout == "balanced" else mask.q_len
        layout = getattr(Layout, given.layout)(of_mask, given.ranks)
    except (ValueError, TypeError, AttributeError, SyntaxError) as error:
        parser.error(str(error))

    plan = make_plan(mask, layout)
    print(plan.report(q_heads=32, kv_heads=8, head_dim=128), end="\n\n")
    plan.draw(given.png, q_heads=32, kv_heads=8, head_dim=128)
    print(f"drawn to {given.png}")
    missing = abs(int(plan.area.sum()) - mask.area)
    failed = verdict(f"the ranks compute the {mask.area} pairs once each", missing, 0)
    if mask.q_len <= MOST_RUN:
        failed |= verdict("over ranks as on one device", run(plan), 1e-10)
    return failed


if __name__ == "__main__":
    sys.exit(main())
