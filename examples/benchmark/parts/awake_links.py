"""What links between GPUs cost them while awake: attention on each of two GPUs by itself, with and
without a few bytes sent to the other meanwhile. Both use the GPU's power, which is limited.

    torchrun --nproc-per-node 2 examples/benchmark/parts/awake_links.py  # 30 s; needs flash-attn-4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from benchmark.measure.clocks import Clock  # noqa: E402
from benchmark.ranks import from_torchrun  # noqa: E402
from shared.launch import count  # noqa: E402

from customized_ops.ring_attention import wrap_masked_attn_func  # noqa: E402
from customized_ops.ring_attention.core.comm.one_sided.symmetric import SymmetricMemory  # noqa: E402
from customized_ops.ring_attention.core.mask import AttnMask  # noqa: E402

TOKENS, HEADS, DIM = 64 << 10, (32, 8), 128
SMALL, LARGE = 4 << 10, 128 << 20  # bytes
SPAN_MS = 160  # during which copies are made; the two passes take 200
CYCLES_A_MS = 1_430_000  # of the clock during attention here, about


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What awake links cost a GPU's clock.")
    parser.add_argument("--runs", type=count, default=16, help="runs behind a median")
    return parser.parse_args(arguments)


def main() -> None:
    """Print milliseconds and MHz of each case on both GPUs."""
    args, rank = parse(), from_torchrun("RANK")
    if from_torchrun("WORLD_SIZE") != 2:
        raise SystemExit("two GPUs are wanted: torchrun --nproc-per-node 2")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    memory = SymmetricMemory(group, device).allocate(LARGE)  # kept alive: its tensors do not do so
    here, there = memory.of_ranks[rank], memory.of_ranks[1 - rank]
    source = torch.empty_like(here).random_()
    attend, beside = attention(device), torch.cuda.Stream(device, priority=-1)

    def with_copies(every_ms: float, n_bytes: int, target: Tensor) -> None:
        now = torch.cuda.current_stream()
        beside.wait_stream(now)
        attend()  # first, as the host takes a while for the copies
        with torch.cuda.stream(beside):
            for _ in range(int(SPAN_MS / every_ms)):
                target[:n_bytes].copy_(source[:n_bytes])
                torch.cuda._sleep(int(every_ms * CYCLES_A_MS))
        now.wait_stream(beside)

    cases: dict[str, Callable[[], None]] = {
        "no copies": attend,
        "4 KiB to itself every 2 ms": lambda: with_copies(2, SMALL, here),
        "4 KiB to the other every 20 ms": lambda: with_copies(20, SMALL, there),
        "4 KiB to the other every 2 ms": lambda: with_copies(2, SMALL, there),
        "128 MiB to itself every 40 ms": lambda: with_copies(40, LARGE, here),
        "128 MiB to the other every 40 ms": lambda: with_copies(40, LARGE, there),
    }
    for name, runs in measured(cases, args.runs, device).items():
        milliseconds, megahertz = map(median, zip(*runs, strict=True))
        line = f"GPU {rank}: {milliseconds:7.2f} ms at {megahertz:6.1f} MHz"
        lines: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(lines, line)
        if rank == 0:
            print(f"{name:32s}  {'   '.join(lines)}", flush=True)
    dist.destroy_process_group()


def measured(
    cases: Mapping[str, Callable[[], None]], runs: int, device: torch.device
) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds and MHz of each run of each case, in a different order each time."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    together = torch.zeros(1, device=device)
    for run in range(runs + 1):  # the first compiles
        taken = []
        for name in Random(run).sample(list(cases), len(cases)):
            clock, ends = Clock(device), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(CYCLES_A_MS)
            dist.all_reduce(together)
            clock.stamp()
            ends[0].record()
            cases[name]()
            ends[1].record()
            clock.stamp()
            taken.append((name, clock, ends))
        torch.cuda.synchronize()
        for name, clock, (start, stop) in taken if run else ():
            found[name].append((start.elapsed_time(stop), clock.megahertz() or 0.0))
    return found


def attention(device: torch.device) -> Callable[[], None]:
    """A forward and a backward of causal attention on one GPU."""
    (h, g), options = HEADS, {"device": device, "dtype": torch.bfloat16}
    q, dout = (torch.randn(1, TOKENS, h, DIM, **options) for _ in range(2))  # type: ignore[arg-type]
    k, v = (torch.randn(1, TOKENS, g, DIM, **options) for _ in range(2))  # type: ignore[arg-type]
    leaves, mask = [t.requires_grad_() for t in (q, k, v)], AttnMask.causal(TOKENS)

    def attend() -> None:
        out = wrap_masked_attn_func(*leaves, mask, kernel="flash4")
        assert isinstance(out, Tensor)
        torch.autograd.grad(out, leaves, dout)

    return attend


if __name__ == "__main__":
    main()
