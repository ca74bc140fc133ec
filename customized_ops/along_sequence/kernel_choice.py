"""Which kernel runs a call of an op."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..ring_attention.core.kernels import KernelError

log = logging.getLogger("seqshard")


class Candidate(Protocol):
    """What every kernel says about itself. Importing it imports no optional package."""

    NAME: str

    def missing(self) -> str | None:
        """What keeps the kernel from running on this machine, or None."""

    def refuses(self, x: Any) -> str | None:
        """Why it cannot run a call, from shapes, dtypes and device alone; or None."""

    def unproven(self, x: Any) -> str | None:
        """Why a call that it can run goes to it only if it is chosen by name; or None."""


K = TypeVar("K", bound=Candidate)


@dataclass(frozen=True)
class KernelChoice(Generic[K]):
    """The kernels of an op.

    Attributes:
        kernels: by name; ``"auto"`` takes the first proven one that can run the call. The last one,
            in plain torch, runs every call.
    """

    kernels: Mapping[str, K]

    def check_name(self, op: str, name: str) -> None:
        """Raise KernelError, which names ``op``, if there is no such kernel."""
        if name not in ("auto", *self.kernels):
            known = ", ".join(("auto", *self.kernels))
            raise KernelError(f"{op}: kernel {name!r} is unknown; known: {known}")

    def choose(self, op: str, name: str, x: Any, tokens: Tensor) -> K:
        """The kernel called ``name``, or for ``"auto"`` the first proven one that can run the call.
        The choice, and why other kernels were passed over, is logged once for each kind of call.

        Args:
            x: the call, as kernels take it. tokens: one of its tensors.
        Raises:
            KernelError: unknown name, or a kernel that cannot; says why, and which can.
        """
        self.check_name(op, name)
        why_not = {
            each: reason
            for each, kernel in self.kernels.items()
            if (reason := kernel.refuses(x) or kernel.missing()) is not None
        }
        able = [each for each in self.kernels if each not in why_not]
        if name != "auto":
            if name in why_not:
                reason = why_not[name]
                raise KernelError(
                    f"{op}: kernel {name!r} cannot do this ({reason}); able: {', '.join(able)}"
                )
            return self.kernels[name]
        for each in able:
            if (reason := self.kernels[each].unproven(x)) is not None:
                why_not[each] = f"only by name: {reason}"
        taken = next(each for each in able if each not in why_not)
        reasons = "; ".join(f"{each}: {reason}" for each, reason in why_not.items())
        slow = tokens.device.type == "cuda" and taken == list(self.kernels)[-1]
        _say(op, taken, reasons, tokens.dtype, tokens.device.type, slow)
        return self.kernels[taken]


@lru_cache(maxsize=256)
def _say(op: str, taken: str, reasons: str, dtype: torch.dtype, device: str, slow: bool) -> None:
    """Log the choice at INFO, or as a warning where a GPU gets the slow kernel."""
    level = logging.WARNING if slow else logging.INFO
    log.log(level, "%s, %s on %s: kernel %s (%s)", op, dtype, device, taken, reasons)
