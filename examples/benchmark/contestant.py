"""What a contestant is, and parts that several contestants share.

Each computes attention of [1, l, heads, d] through autograd; a rank's inputs are in its ``layout``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from benchmark.cases import Case
from benchmark.compete.peers.kernels import KERNELS, Form, Kernel
from benchmark.compete.peers.scheme import Scheme
from benchmark.ranks import Ranks
from customized_ops.ring_attention import Layout

ONE_CALL = ("causal", "full", "packed", "packed full", "window")  # one library call does the case

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contestant:
    """One way to compute a case.

    Attributes:
        kernel: what computes on a device, for the table.
        make: makes its attention for a case on this rank; raises if that is not possible.
        layout: which tokens each rank holds, for a number of ranks.
        refuses: why it cannot do a case over a number of ranks, or None.
        whole: whether each rank computes the whole case alone, as a baseline.
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
    """The options of a run with which contestants are made."""

    device: torch.device
    kernel: str = "auto"
    reduce_dtype: torch.dtype | None = None
    deterministic: bool = False
    fa2: bool = False
    single: tuple[str, ...] = ("auto",)


class Alone(Scheme):
    """One kernel call on a whole sequence."""

    def __init__(self, kernel: Kernel, form: Form) -> None:
        self.kernel, self.form = kernel, form

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, lse = self.kernel.forward(q, k, v, self.form)
        return out, (q, k, v, out, lse)

    def backward(self, dout: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.kernel.backward(dout, *saved, self.form)


def device_kernels(choice: Choice) -> list[Kernel]:
    """The kernels that peers are run with."""
    if choice.device.type == "cpu":
        return [KERNELS["plain"]]
    return [KERNELS["flash4"]] + [KERNELS["fa2"]] * choice.fa2


def whole_form(case: Case, device: torch.device) -> Form:
    """The form of one call for a whole case."""
    if not case.packed:
        return Form(causal=case.causal, window=case.window)
    return Form.packed(case.bounds, case.bounds, device, causal=case.causal)


def only(*kinds: str, even: bool = False, heads: bool = False) -> Callable[[Case, int], str | None]:
    """A function that refuses other kinds, lengths that do not divide (into zigzag chunks or, with
    ``even``, contiguous shards), and with ``heads`` also heads that do not divide.
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
    """Contiguous shards."""
    return Layout.contiguous(case.tokens, ranks)


def zigzag(case: Case, ranks: int) -> Layout:
    """2 P chunks of the sequence, or of each document."""
    bounds = case.bounds if case.packed else None
    return Layout.zigzag(case.tokens, ranks, bounds)


def alone(case: Case, ranks: int) -> Layout:
    """The whole sequence on one rank."""
    return Layout.contiguous(case.tokens, 1)
