"""What a contestant is, and what several of them are made of.

Each attends [1, l, heads, d] through autograd; what a rank is given lies as its ``layout`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from benchmark.cases import Case
from benchmark.compete.peers.kernels import KERNELS, Form, Kernel
from benchmark.ranks import Ranks
from customized_ops.ring_attention import Layout

ONE_CALL = ("causal", "full", "packed", "packed full", "window")  # of a library, for the whole case

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contestant:
    """One way to compute a case.

    Attributes:
        kernel: what computes on a device, for the table.
        make: its attention for a case on this rank; raises what is wrong.
        layout: which tokens each of so many ranks holds.
        refuses: why it cannot do a case over so many ranks, or None.
        whole: whether each rank computes all of it alone: the baseline.
        missing: why it does not run on this machine, or None.
    """

    name: str
    kernel: str
    make: Callable[[Case, Ranks], Attention]
    layout: Callable[[Case, int], Layout]
    refuses: Callable[[Case, int], str | None] = lambda case, ranks: None
    whole: bool = False
    missing: str | None = None


@dataclass(frozen=True)
class Choice:
    """Of a run: what contestants are made with."""

    device: torch.device
    kernel: str = "auto"
    reduce_dtype: torch.dtype | None = None
    deterministic: bool = False
    fa2: bool = False
    single: tuple[str, ...] = ("auto",)
    extra: tuple[Contestant, ...] = field(default=())


class Alone:
    """One kernel call on a whole sequence, as a scheme."""

    def __init__(self, kernel: Kernel, form: Form) -> None:
        self.kernel, self.form = kernel, form

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See :class:`~.peers.scheme.Scheme`."""
        out, lse = self.kernel.forward(q, k, v, self.form)
        return out, (q, k, v, out, lse)

    def backward(self, dout: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~.peers.scheme.Scheme`."""
        return self.kernel.backward(dout, *saved, self.form)


def device_kernels(choice: Choice) -> list[Kernel]:
    """Those that peers are run with."""
    if choice.device.type == "cpu":
        return [KERNELS["plain"]]
    return [KERNELS["flash4"]] + [KERNELS["fa2"]] * choice.fa2


def whole_form(case: Case, device: torch.device) -> Form:
    """One call for a whole case."""
    if not case.packed:
        return Form(causal=case.causal, window=case.window)
    return Form.packed(case.bounds, case.bounds, device, causal=case.causal)


def only(*kinds: str, even: bool = False, heads: bool = False) -> Callable[[Case, int], str | None]:
    """Refuses all but these kinds; tokens that do not divide (zigzag, or ``even``: contiguously),
    and with ``heads`` heads that do not.
    """

    def refuses(case: Case, ranks: int) -> str | None:
        if case.kind not in kinds:
            return f"knows {', '.join(kinds)} masks"
        parts = ranks if even else 2 * ranks
        lengths = [case.tokens] if even else [b - a for a, b in pairwise(case.bounds)]
        if any(n % parts for n in lengths):
            return f"wants lengths that {parts} divides"
        if heads and any(n % ranks for n in case.heads):
            return f"deals out heads, and {ranks} ranks do not divide {case.heads}"
        return None

    return refuses


def contiguous(case: Case, ranks: int) -> Layout:
    """Tokens as they come."""
    return Layout.contiguous(case.tokens, ranks)


def zigzag(case: Case, ranks: int) -> Layout:
    """2 P chunks of the sequence, or of each document."""
    bounds = case.bounds if case.packed else None
    return Layout.zigzag(case.tokens, ranks, bounds)


def alone(case: Case, ranks: int) -> Layout:
    """All of it."""
    return Layout.contiguous(case.tokens, 1)
