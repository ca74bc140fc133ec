"""How fast parts are merged, added and moved, by the kernels and by plain torch.

    python examples/benchmark/parts/plumbing_speed.py [--rows 4096] [--bandwidth 4.8]

One row per operation on [1, rows, heads, d]: microseconds on the GPU (CUDA events, the median of
several replays of a CUDA graph with the calls in it); the share of the GPU's memory bandwidth that
this amounts to, if its bytes are each read or written once; and microseconds of the host per call.

    target    80 % of the bandwidth for merging in bf16; 10 us of the host for a call
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from customized_ops.ring_attention.core.merge import merge_
from customized_ops.ring_attention.core.merge import rows as fused
from customized_ops.ring_attention.core.merge.rows import add_rows, copy_rows

CALLS = 10  # in a graph; each uses memory of its own, so that no cache holds what it reads
BF16, FP32 = torch.bfloat16, torch.float32
Case = tuple[str, int, Callable[[], list[Callable[[], object]]]]  # name, bytes, what to call


def rows_of(count: int, heads: int, d: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, count, heads, d, device="cuda").to(dtype)


def merging(count: int, d: int, out: torch.dtype, part: torch.dtype, by_index: bool) -> Case:
    """Merging all rows, or half of them if by index."""
    some = count // 2 if by_index else count
    elements = some * 32 * d
    bytes_moved = elements * (2 * out.itemsize + part.itemsize) + 3 * 4 * some * 32

    def make() -> list[Callable[[], object]]:
        index = torch.randperm(count, device="cuda")[:some].sort().values if by_index else None
        calls: list[Callable[[], object]] = []
        for _ in range(CALLS):
            tensors = (
                rows_of(count, 32, d, out),
                torch.randn(1, 32, count, device="cuda"),
                rows_of(some, 32, d, part),
                torch.randn(1, 32, some, device="cuda"),
            )
            calls.append(lambda tensors=tensors: merge_(*tensors, index))  # type: ignore[misc]
        return calls

    which = "rows" if by_index else "all "
    return f"merge {which} d {d} {name(out)} <- {name(part)}", bytes_moved, make


def adding(count: int, total: torch.dtype, part: torch.dtype, by_index: bool) -> Case:
    """Adding to a quarter of the rows; a range with torch's add_ unless by index."""
    some, d = count // 4, 128
    bytes_moved = some * 32 * d * (2 * total.itemsize + part.itemsize)

    def make() -> list[Callable[[], object]]:
        index = torch.arange(some, 2 * some, device="cuda")
        calls: list[Callable[[], object]] = []
        for _ in range(CALLS):
            a, b = rows_of(count, 32, d, total), rows_of(some, 32, d, part)
            by_rows = lambda a=a, b=b: add_rows([b], [a], [1], index)  # noqa: E731
            of_range = lambda a=a, b=b: a[:, some : 2 * some].add_(b)  # noqa: E731
            calls.append(by_rows if by_index else of_range)
        return calls

    return (
        f"add {'rows ' if by_index else 'range'} {name(total)} += {name(part)}",
        bytes_moved,
        make,
    )


def moving(count: int, tensors: int, heads: int, put: bool) -> Case:
    """Moving a quarter of the rows of some tensors."""
    some, d = count // 4, 128
    bytes_moved = 2 * tensors * some * heads * d * 2

    def make() -> list[Callable[[], object]]:
        index = torch.randperm(count, device="cuda")[:some].sort().values
        calls: list[Callable[[], object]] = []
        for _ in range(CALLS):
            whole = [rows_of(count, heads, d, BF16) for _ in range(tensors)]
            parts = [rows_of(some, heads, d, BF16) for _ in range(tensors)]
            dims = [1] * tensors
            take = partial(copy_rows, whole, parts, dims, from_rows=index)
            place = partial(copy_rows, parts, whole, dims, to_rows=index)
            calls.append(place if put else take)
        return calls

    return f"{'put ' if put else 'take'} {tensors} tensors, {heads} heads", bytes_moved, make


def name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP32: "fp32"}[dtype]


def cases(count: int) -> Iterator[Case]:
    for d in (64, 96, 128, 192, 256):
        yield merging(count, d, BF16, BF16, False)
    yield merging(count, 128, FP32, BF16, False)
    yield merging(count, 128, BF16, BF16, True)
    yield merging(count, 128, FP32, BF16, True)
    for by_index in (False, True):
        for total, part in ((BF16, BF16), (FP32, BF16), (BF16, FP32), (FP32, FP32)):
            yield adding(count, total, part, by_index)
    for put in (False, True):
        for tensors, heads in ((1, 32), (2, 8), (3, 32)):
            yield moving(count, tensors, heads, put)


def gpu_seconds(calls: list[Callable[[], object]]) -> float:
    """Seconds of one call on the GPU, when it need not wait for the host."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(9):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1000 / len(calls))
    return median(times)


def host_seconds(calls: list[Callable[[], object]]) -> float:
    """Seconds of one call on the host, until it returns."""
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        began = perf_counter()
        for call in calls:
            call()
        times.append((perf_counter() - began) / len(calls))
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--rows", type=int, default=4096)
    add("--bandwidth", type=float, default=4.8, help="the GPU's, in TB/s (an H200's)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it measures a GPU, and there is none here")
    count, peak = options.rows, options.bandwidth * 1e12
    device = torch.cuda.get_device_name()
    kernels = fused._launch
    print(f"{device}, {options.bandwidth} TB/s, torch {torch.__version__}, {count} rows")
    print(f"{'':32}{'kernel us':>10}{'of peak':>9}{'host us':>9}{'torch us':>10}{'host us':>9}")
    for title, bytes_moved, make in cases(count):
        figures = []
        for launch in (kernels, lambda: None):
            fused._launch = launch  # type: ignore[assignment]
            calls = make()
            figures += [gpu_seconds(calls), host_seconds(calls)]
        fused._launch = kernels
        ours, host, theirs, their_host = figures
        print(
            f"{title:32}{ours * 1e6:10.1f}{bytes_moved / ours / peak:9.0%}{host * 1e6:9.1f}"
            f"{theirs * 1e6:10.1f}{their_host * 1e6:9.1f}"
        )


if __name__ == "__main__":
    main()
