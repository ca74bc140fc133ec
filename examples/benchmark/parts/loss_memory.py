"""Memory and time of chunked linear cross entropy beside the plain form, forward and backward.

    python examples/benchmark/parts/loss_memory.py
    python examples/benchmark/parts/loss_memory.py --sizes 65536x131072x4096 --chunk-sizes 512 1024
    python examples/benchmark/parts/loss_memory.py --device cpu --sizes 64x1000x32

plain is ``cross_entropy(linear(hidden, weight).float(), target)``. Peaks are what is allocated
beyond hidden, weight and target, including the gradients. The plain form's peak is also computed,
which is the only figure if it runs out of memory: 12 bytes per logit, when its backward holds the
log-probabilities and two gradients in fp32. TFLOP/s count the plain form's three products,
6 l v d, for both: recomputing logits is not useful work.

The last sizes are those where chunks do not pay off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from customized_ops.chunk_linear_cross_entropy import chunk_linear_cross_entropy

# tokens x vocabulary x width
SIZES = (
    "65536x131072x4096",
    "16384x131072x4096",
    "16384x32768x4096",
    "8192x131072x2048",
    "4096x32768x2048",
    "1024x32768x1024",
)
GIB = 2**30

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The form that users write: all logits, in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def chunked(chunk_size: int | None) -> Loss:
    """This package's form."""
    return lambda h, w, t: chunk_linear_cross_entropy(h, w, t, chunk_size=chunk_size)


def computed_bytes(tokens: int, vocab: int, width: int, itemsize: int) -> int:
    """Peak of the plain form: in log-softmax's backward, or when the gradients are computed."""
    logits, gradients = tokens * vocab, (tokens + vocab) * width * itemsize
    return max(12 * logits, itemsize * logits + gradients)


def measure(
    loss: Loss, size: Sequence[int], dtype: torch.dtype, device: str, runs: int
) -> tuple[float, int]:
    """Seconds of the median run and peak bytes (0 if the device cannot tell).

    Raises:
        torch.OutOfMemoryError: the loss does not fit.
    """
    tokens, vocab, width = size
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=dtype, device=device).requires_grad_()
    weight = (torch.randn(vocab, width, dtype=dtype, device=device) * width**-0.5).requires_grad_()
    target = torch.randint(vocab, (tokens,), device=device)
    cuda = hidden.is_cuda
    times, peak = [], 0
    for n in range(runs + 1):
        hidden.grad = weight.grad = None
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        began = perf_counter()
        loss(hidden, weight, target).backward()
        if cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        if n:  # the first one warms up
            times.append(perf_counter() - began)
    return median(times), peak


def row(name: str, loss: Loss, size: Sequence[int], args: argparse.Namespace) -> str:
    """One line of the table."""
    tokens, vocab, width = size
    start = f"{tokens:>7} {vocab:>7} {width:>6}  {name:<13}"
    try:
        seconds, peak = measure(loss, size, getattr(torch, args.dtype), args.device, args.runs)
    except torch.OutOfMemoryError:
        return f"{start} {'out of memory':>20}"
    finally:
        if args.device == "cuda":
            torch.cuda.empty_cache()
    tflops = 6e-12 * tokens * vocab * width / seconds
    used = f"{peak / GIB:.2f}" if peak else "-"
    return f"{start} {used:>9} {1e3 * seconds:>10.2f} {tflops:>8.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Memory and time of the chunked loss.")
    add = parser.add_argument
    add("--sizes", nargs="+", default=SIZES, help="tokens x vocabulary x width")
    add("--chunk-sizes", nargs="*", type=int, default=[], help="besides the default")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--runs", type=int, default=5)
    args = parser.parse_args(arguments)
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    print(f"{device}, torch {torch.__version__}, {args.dtype}, forward + backward")
    print(f"{'l':>7} {'v':>7} {'d':>6}  {'form':<13} {'peak GiB':>9} {'ms':>10} {'TFLOP/s':>8}")
    for text in args.sizes:
        size = [int(n) for n in text.split("x")]
        itemsize = getattr(torch, args.dtype).itemsize
        print(row("plain", plain, size, args), flush=True)
        print(f"{'':>24} computed {computed_bytes(*size, itemsize) / GIB:>13.2f}")
        print(row("chunked", chunked(None), size, args), flush=True)
        for chunk_size in args.chunk_sizes:
            print(row(f"  chunk {chunk_size}", chunked(chunk_size), size, args), flush=True)


if __name__ == "__main__":
    main()
