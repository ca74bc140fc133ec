"""Attention over several GPUs, forward and backward, beside its peers and beside the ideal.

    torchrun --nproc-per-node 2 examples/benchmark/attention.py --suite causal --json causal.jsonl
    python examples/benchmark/attention.py --ranks 2 --suite all --json all.jsonl --plot all.png
    python examples/benchmark/attention.py --from-json 1.jsonl 2.jsonl --markdown --plot all.png
    python examples/benchmark/attention.py --ranks 8 --suite scale --list
    python examples/benchmark/attention.py --ranks 8 --suite scale --predict
    torchrun --nproc-per-node 4 examples/benchmark/attention.py --suite scale --kinds causal full \
--tokens 64k 256k --heads 64:8 32:8 --seconds 240 --json scale.jsonl
    python examples/benchmark/attention.py --ranks 2 --device cpu --dtype float32 --tokens 256 \
--heads 4:2 --head-dim 16

Ideal: the time of the fastest kernel for the whole problem on one GPU, divided by the number of
GPUs. It is measured in the same run, on all GPUs at once, each by itself, so that they are equally
warm. All contestants of a case take turns in one process group, in a different order each round.
Ranks start each run together; a time is the median of runs, of the slowest rank. A contestant that
fails, or computes anything other than attention, is reported and has no time. Inputs are in a
contestant's layout before the clock starts, as in a model that lays its inputs out once. If the
whole problem would take one GPU too long, or too much memory, the ideal is scaled by FLOP from
fewer heads and, if that is not enough, from fewer tokens.

FLOP: 4 x attended pairs x query heads x head dim forward, 2.5 times that backward. Memory: the peak
of a rank beyond its inputs, also in units of its q, k, v and out. "new ms": what the first call
with another length costs beyond a later one: the plan, and what kernels make of it.

A second table compares what this package's plans predict with what was measured: predicted times,
and how far off they were; bytes that the busiest rank receives, as planned (and as the group
counted them, if that differs); and how far these bytes, and the pairs of the busiest rank, are
above the least that any plan can reach (``core/plan/bounds.py``). Its "memory x" is a ratio. The
numerator is what a rank holds at its peak, including its inputs (q, k, v and the gradient of out)
and the symmetric memory that a pass uses. The denominator is what the same op holds on one device
for as many tokens, plus the keys and values of one more such shard.

To add a contestant, see ``contestants.py``. Peers' schemes are in ``peers/``, written from their
descriptions; peers' packages are measured too if they are installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Import from the package above, not from this file's folder.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from benchmark.command import parse
from benchmark.compete.predict import predicted
from benchmark.compete.run import listed, run
from benchmark.ranks import launch
from benchmark.show.plot import draw
from benchmark.show.runs import read
from benchmark.show.tables import tables


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or draw earlier measurements."""
    args = parse(arguments)
    if args.from_json:
        rows = read(args.from_json)
        if args.markdown:
            print(tables(rows))
        if args.plot:
            draw(rows, args.plot)
        return
    if args.list or args.predict:
        print(predicted(args) if args.predict else listed(args))
        return
    launch(run, args.ranks, args)
    if args.plot and os.environ.get("RANK", "0") == "0":
        draw(read([args.json]), args.plot)


if __name__ == "__main__":
    main()
