"""One trial: a call over ranks, its verdict, and the script that repeats it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..core.comm.inprocess import run_ranks
from ..core.mask import AttnMask
from .kinds.distributed_case import TERMS, DistributedCase

TOLERANCE = 1e-10  # in fp64


@dataclass(frozen=True)
class Trial:
    """A call over in-process ranks; or, with a policy, a layer that ``parallelize`` shards.

    Attributes:
        policy: for ``parallelize``, over ``ranks`` processes; "" calls the function with a group.
    """

    case: DistributedCase
    ranks: int
    policy: str = ""

    def failure(self) -> str:
        """What is wrong with the call's results, or the error that it raised; "" if nothing is."""
        try:
            ranks = run_ranks(
                self.ranks, lambda comm: self.case.run_rank(comm.rank, self.ranks, comm)
            )
            return self.difference(self.case.gather(ranks))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def difference(self, got: list[Tensor]) -> str:
        """What differs from the specification by more than is allowed; "" if nothing does.

        In fp64 nothing may differ by more than TOLERANCE. In lower precision the root mean square
        of errors may be twice that of the same call on one device, plus two roundings of the result
        or of the inputs, which are of size 1: gradients may be small differences of large terms.
        A sum over ranks has a term for each row, whose roundings add up like random errors.
        """
        case, want = self.case, self.case.expected()
        exact = case.dtype == torch.float64
        alone = want if exact else case.on_one_device.run_rank(0, 1, None)
        compared = case.compared(self.ranks)
        for name, a, b, single in zip(compared, got, want, alone, strict=True):
            if a.shape != b.shape:
                return f"{name}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
            finite = b.isfinite()
            if not torch.equal(a[~finite].double(), b[~finite].double()):
                return f"{name}: not infinite where, and as, it should be"
            a, b, single = (t[finite].double() for t in (a, b, single))
            error = _worst(a - b) if exact else _rms(a - b)
            terms = case.rows if compared[name] == TERMS else 1
            rounding = 2 * torch.finfo(case.dtype).eps * terms**0.5
            allowed = TOLERANCE if exact else 2 * _rms(single - b) + rounding * max(_rms(b), 1.0)
            if not error <= allowed:
                return f"{name}: error {error:.3e}, allowed {allowed:.3e}"
        return ""

    def script(self, failure: str) -> str:
        """A program that repeats the trial; exits with 1 if it still fails."""
        kind = type(self.case)
        engine = "from customized_ops.ring_attention.fuzz import engine\n" * bool(self.policy)
        return (
            f"# {failure.partition(chr(10))[0]}\n"
            "import torch\n"
            "from customized_ops.ring_attention import AttnMask\n"
            f"from customized_ops.ring_attention.fuzz import {kind.__name__}, Trial\n"
            f"{engine}\n"
            'if __name__ == "__main__":\n'
            f"    trial = {self}\n"
            f"    failure = {'next(engine.run([trial]))' if engine else 'trial.failure()'}\n"
            "    raise SystemExit(failure or 0)\n"
        )

    def __str__(self) -> str:
        """The trial as the expression that makes it."""
        given = {f.name: getattr(self.case, f.name) for f in fields(self.case)}
        told = {f.name: given[f.name] for f in fields(self.case) if given[f.name] != f.default}
        arguments = ", ".join(f"{name}={_expression(value)}" for name, value in told.items())
        policy = f", policy={self.policy!r}" if self.policy else ""
        return f"Trial({type(self.case).__name__}({arguments}), ranks={self.ranks}{policy})"


def _expression(value: Any) -> str:
    if not isinstance(value, AttnMask):
        return repr(value)
    return f"AttnMask.from_slices({value.slices.tolist()}, {value.q_len}, {value.k_len})"


def _worst(difference: Tensor) -> float:
    return difference.abs().amax().item() if difference.numel() else 0.0


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0
