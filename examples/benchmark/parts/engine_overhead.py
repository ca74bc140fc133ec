"""What the embedded engine costs the host, for each op of a model and for a step.

    python examples/benchmark/parts/engine_overhead.py
    python examples/benchmark/parts/engine_overhead.py --layers 4 --ranks 8 --device cuda

A small Llama runs forward and backward on few tokens, so that the host is what is measured: the
module by itself, and as rank 0 of a plan, on DTensors (``lowered=False``), lowered, and lowered and
compiled (``--compile``). The other ranks are absent (torch's "fake" process group), so messages
cost nothing and gradients are meaningless. Figures are the minimum of several rounds, since other
work on the machine only adds to them. An op is one of the captured graph, with forward and backward
counted together. The last column is the time of the first call, which includes any tracing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[3] / "examples")]

from shared.llama import Llama, LlamaConfig

from annotations import ComputeConfig, parallelize
from annotations.engines.torch.capture.capture import capture

TOKENS, ROUNDS = 32, 30
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def inputs(device: str) -> dict[str, Tensor]:
    """One sequence of random tokens."""
    tokens = torch.randint(64, (1, TOKENS), device=device)
    positions = torch.arange(TOKENS, device=device)[None]
    return {"tokens": tokens, "targets": tokens.roll(-1, 1), "position_ids": positions}


def measure(model: Callable[..., Tensor], given: dict[str, Tensor], device: str) -> list[float]:
    """Microseconds on the host of a forward and of a backward, and of both in the first call."""
    best = [float("inf")] * 2
    first = 0.0
    for n in range(ROUNDS):
        times = []
        began = perf_counter()
        loss = model(**given)
        times.append(perf_counter() - began)
        began = perf_counter()
        loss.backward()
        times.append(perf_counter() - began)
        if device == "cuda":
            torch.cuda.synchronize()
        first = first if n else sum(times)
        best = [min(pair) for pair in zip(best, times, strict=True)]
    return [seconds * 1e6 for seconds in (*best, first)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DTYPES, default="cpu")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="also compiled by inductor")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=asked.ranks)
    config = LlamaConfig(
        dim=32, layers=asked.layers, heads=8, kv_heads=8, hidden=48, vocab=64, op="ring"
    )
    model = Llama(config).to(asked.device, DTYPES[asked.device])
    given = inputs(asked.device)
    ops = sum(node.op == "call_function" for node in capture(model, given).graph.nodes)

    def planned(**options: Any) -> Callable[..., Tensor]:
        return parallelize(
            model, given, "cp", ComputeConfig(asked.ranks, asked.ranks), engine="torch", **options
        )

    ways: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "one process": lambda: model,
        "on DTensors": lambda: planned(lowered=False),
        "lowered": planned,
    }
    if asked.compile:
        ways["compiled"] = lambda: planned(compile=True)
    print(f"{asked.layers} layers, {ops} ops, {asked.ranks} ranks, {asked.device}")
    print(f"{'':>12} {'us an op':>9} {'forward us':>11} {'backward us':>12} {'first call s':>13}")
    for name, make in ways.items():
        forward, backward, first = measure(make(), given, asked.device)
        row = f"{(forward + backward) / ops:>9.1f} {forward:>11.0f} {backward:>12.0f}"
        print(f"{name:>12} {row} {first / 1e6:>13.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
