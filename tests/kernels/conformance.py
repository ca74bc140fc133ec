"""How a kernel is tried on a case, and how near its results must be.

The truth is dense attention in fp64 on the same values. The measure is what the textbook makes of
them in the case's dtype: sums of products in fp32, softmax in fp32, probabilities and gradients of
scores rounded before they are multiplied. A kernel may be twice as far from the truth, plus one
rounding: at its worst value, and in the root mean square, where a wrong tile shows that larger
values elsewhere would hide.

    python tests/kernels/conformance.py               every kernel x case: worst error / tolerance
    python tests/kernels/conformance.py --kernels torch --device cpu
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root), str(root / "examples"), str(root / "tests" / "support" / "cases")]
    __package__ = "tests.kernels"

from dense import assert_same

from customized_ops.ring_attention import wrap_masked_attn_func
from customized_ops.ring_attention.core.kernels import (
    KERNELS,
    BackwardOperands,
    ForwardOperands,
    Kernel,
    Pairs,
    refusal,
)
from customized_ops.ring_attention.core.mask.slices import clip, shift
from customized_ops.ring_attention.core.merge.merge import Accumulator

from .cases import Case, Inputs, cases, inputs
from .textbook import Results, textbook, truth

LSE_SHARE = 1 / 8  # of a rounding of 1: what lse may be off by


def run(kernel: Kernel, case: Case, given: Inputs, pairs: Pairs) -> Results:
    """One forward and one backward of a kernel."""
    out, lse = kernel.forward(ForwardOperands(given.q, given.k, given.v), pairs, case.scoring, None)
    assert out.dtype in (case.dtype, torch.float32), f"out is {out.dtype}"
    assert lse.dtype == torch.float32, f"lse is {lse.dtype}"
    out = out.to(case.dtype)
    return {"out": out, "lse": lse, **_backward(kernel, case, given, out, lse, pairs)}


def _backward(
    kernel: Kernel, case: Case, given: Inputs, out: Tensor, lse: Tensor, pairs: Pairs
) -> Results:
    operands = BackwardOperands(given.dout, given.q, given.k, given.v, out, lse, given.dlse)
    gradients = kernel.backward(
        operands, pairs, case.scoring, None, deterministic=case.deterministic
    )
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def run_in_parts(kernel: Kernel, case: Case, given: Inputs) -> Results:
    """The same from two calls, each on some of the keys, merged as the executor does."""
    mask = case.make_mask()
    bounds = [0, mask.k_len // 2 - 3, mask.k_len]
    parts = []
    for k0, k1 in pairwise(bounds):
        here = shift(clip(mask.slices, 0, mask.q_len, k0, k1), 0, -k0)
        pairs = Pairs(here, mask.q_len, k1 - k0)
        some = Inputs(
            given.q, given.k[:, k0:k1], given.v[:, k0:k1], given.dout, given.dlse, given.sink
        )
        parts.append((some, pairs))
    whole = Accumulator()
    for some, pairs in parts:
        whole.add(
            *kernel.forward(ForwardOperands(some.q, some.k, some.v), pairs, case.scoring, None)
        )
    out, lse = whole.result(given.q, case.dims[1], case.dtype)
    first, second = (_backward(kernel, case, some, out, lse, pairs) for some, pairs in parts)
    made = {name: torch.cat([first[name], second[name]], dim=1) for name in ("dk", "dv")}
    return {"out": out, "lse": lse, "dq": first["dq"].float() + second["dq"].float(), **made}


def run_op(kernel: Kernel, case: Case, given: Inputs) -> Results:
    """The same through the public op on one rank, which is where a sink is known."""
    tensors = {"dq": given.q, "dk": given.k, "dv": given.v, "dsink": given.sink}
    leaves = {n: t.detach().requires_grad_() for n, t in tensors.items() if t is not None}
    out, lse = wrap_masked_attn_func(
        leaves["dq"],
        leaves["dk"],
        leaves["dv"],
        case.make_mask(),
        softcap=case.softcap,
        sink=leaves.get("dsink"),
        return_lse=True,
        kernel=kernel.NAME,
    )
    ends, gradients = [out], [given.dout]
    if given.dlse is not None:
        ends, gradients = [out, lse], [given.dout, given.dlse]
    made = torch.autograd.grad(ends, list(leaves.values()), gradients)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, made, strict=True))}


def assert_near(name: str, got: Tensor, want: Tensor, plain: Tensor, dtype: torch.dtype) -> float:
    """Within twice the textbook's error plus a rounding; returns error / tolerance.

    lse, which weighs parts of a row's keys in their sum, may be off by an eighth of a rounding of 1
    in ``dtype``: some libraries approximate a softcap's tanh. dk and dv may at worst be two
    roundings off: they are sums over heads and blocks of rows, which libraries round too.
    """
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    finite = want.isfinite()
    if not finite.any():
        assert_same(name, got, want, 0.0)
        return 0.0
    eps, values = torch.finfo(dtype).eps, want[finite].double()
    rounding = eps + 4 * torch.finfo(torch.float32).eps
    unit = torch.full_like(values, LSE_SHARE) if name == "lse" else values
    errors = [(t[finite].double() - values).abs() for t in (got, plain)]
    ratios = []
    for way, measure in (("worst", torch.amax), ("rms", _rms)):
        error, usual = (measure(e).item() for e in errors)
        roundings = 2 if way == "worst" and name in ("dk", "dv") else 1
        tolerance = 2 * usual + roundings * rounding * measure(unit.abs()).item()
        if way == "worst":
            assert_same(name, got, want, tolerance)
        assert error <= tolerance, f"{name}: {way} error {error:.3e} > {tolerance:.3e}"
        ratios.append(error / tolerance if tolerance else 0.0)
    return max(ratios)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def judge(case: Case, given: Inputs, got: Results) -> float:
    """The largest error / tolerance of all results, which must be within tolerance."""
    want, plain = truth(case, given), textbook(case, given)
    mask = torch.from_numpy(case.make_mask().to_dense()).to(given.q.device)
    ratio = max(assert_near(n, got[n], want[n], plain[n], case.dtype) for n in want)
    for dim, names in ((1, ("out", "dq")), (0, ("dk", "dv"))):
        unattended = ~mask.any(dim)
        for name in names:
            assert (got[name][:, unattended] == 0).all(), f"{name}: not 0 where nothing attends"
    return ratio


# By the protocol: the specification copies masks to the GPU, and is not there to be fast.
MAY_WAIT = ("reference",)


@contextmanager
def no_waiting(device: str, kernel: str = "") -> Iterator[None]:
    """Whatever makes the host wait for the GPU is an error, but in kernels of MAY_WAIT."""
    if device == "cpu" or kernel in MAY_WAIT:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def check_twice(kernel: Kernel, case: Case, device: str) -> float:
    """Two calls on other values, the second of which finds all that was made for the first, and
    must not wait for the device."""
    mask = case.make_mask()
    pairs = Pairs(mask.slices, mask.q_len, mask.k_len)
    first, second = (inputs(case, device, seed) for seed in (0, 1))
    ratio = judge(case, first, run(kernel, case, first, pairs))
    with no_waiting(device, kernel.NAME):
        got = run(kernel, case, second, pairs)
    return max(ratio, judge(case, second, got))


def check_parts(kernel: Kernel, case: Case, device: str) -> float:
    """Keys in two parts."""
    given = inputs(case, device, 2)
    return judge(case, given, run_in_parts(kernel, case, given))


def check_op(kernel: Kernel, case: Case, device: str) -> float:
    """Through the public op."""
    given = inputs(case, device, 3)
    return judge(case, given, run_op(kernel, case, given))


def check_repeats(kernel: Kernel, case: Case, device: str) -> float:
    """The forward is the same bit for bit from run to run; so is the backward where asked for."""
    mask, given = case.make_mask(), inputs(case, device, 0)
    pairs = Pairs(mask.slices, mask.q_len, mask.k_len)
    want = run(kernel, case, given, pairs)
    for _ in range(3 if case.deterministic else 1):
        got = run(kernel, case, given, pairs)
        for name in want if case.deterministic else ("out", "lse"):
            assert torch.equal(got[name], want[name]), f"{name} differs from run to run"
    return 0.0


Check = Callable[[Kernel, Case, str], float]


def checks(case: Case) -> dict[str, Check]:
    """What is tried of a case."""
    if case.sink:
        return {"op": check_op}
    tried: dict[str, Check] = {"twice": check_twice, "repeats": check_repeats}
    if case == Case(case.tokens, case.mask, lse_gradient=case.lse_gradient):
        tried["parts"] = check_parts
    return tried


def attempt(check: Check, kernel: Kernel, case: Case, device: str) -> tuple[float, str]:
    """(error / tolerance, "") or (inf, what went wrong)."""
    try:
        return check(kernel, case, device), ""
    except Exception as error:  # any: a library's errors are of many types
        return torch.inf, f"{type(error).__name__}: {str(error)[:400]}"


def main() -> int:
    """Print a table of kernels x cases, and after it what failed and what was refused why."""
    parser = argparse.ArgumentParser(description="Errors of every kernel on every case.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    args = parser.parse_args()
    notes: dict[str, int] = {}
    failures = 0
    print(f"| case | {' | '.join(args.kernels)} |\n|---|{'---|' * len(args.kernels)}")
    for case in cases(args.device):
        row = []
        for kernel in map(KERNELS.__getitem__, args.kernels):

            def note(text: str, name: str = kernel.NAME) -> int:
                return notes.setdefault(f"{name}: {text}", len(notes) + 1)

            why = refusal(kernel, case.request(args.device))
            if why is not None:
                row.append(f"refused [{note(why)}]")
                continue
            tried = {n: attempt(c, kernel, case, args.device) for n, c in checks(case).items()}
            wrong = {n: text for n, (_, text) in tried.items() if text}
            failures += len(wrong)
            marks = [f"{n} [{note(text)}]" for n, text in wrong.items()]
            row.append(f"FAILED {', '.join(marks)}" if wrong else f"{max(tried.values())[0]:.2f}")
        print(f"| {case} | {' | '.join(row)} |", flush=True)
    print("\nWorst error / tolerance.", *(f"[{n}] {text}" for text, n in notes.items()), sep="\n")
    return failures


if __name__ == "__main__":
    sys.exit(main() > 0)
