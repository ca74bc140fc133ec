"""One step of a model as its owner shows it to the probes, and what a rank records of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..core.arrays import Ints
from ..op.arguments import ArgumentError, require

Floats = npt.NDArray[np.float64]
PADDING = -1  # the position of an output that belongs to no token


@dataclass(frozen=True, eq=False)
class ModelRun:
    """What one step of a model computed, on this rank.

    Attributes:
        loss: one number for the whole batch, as a log would show it: the same on every rank.
        output: [b, l, ...], for this rank's tokens: logits, or hidden states, which take less
            memory.
        positions: the place of each token of ``output`` in the whole sequence, -1 for padding; None
            if ``output`` has the whole sequence in order.
        gradients: as the optimizer would take them, already added up over the ranks: by name, or as
            the module whose parameters have them; the module's are then set to None. DTensors are
            made whole. None leaves gradients out.
    """

    loss: Tensor | float
    output: Tensor
    positions: Tensor | Sequence[int] | Ints | None = None
    gradients: nn.Module | Mapping[str, Tensor | None] | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """What a :class:`ModelRun` showed, on the host in fp64: output [b, l, n], positions [l].
    ``precision`` is the dtype that output had, ``rounding`` the resolution of the loss's dtype."""

    loss: float
    output: Tensor
    positions: Ints
    gradients: Mapping[str, Tensor]
    precision: torch.dtype
    rounding: float = 0.0

    @classmethod
    def of(cls, run: object, who: str) -> Step:
        """Read a run.

        Raises:
            ArgumentError: ``who`` returned something else; the message says what would fit.
        """
        if not isinstance(run, ModelRun):
            raise ArgumentError(
                f"check_parallel_model: {who} must return a ModelRun, got {type(run).__name__}"
            )
        output = run.output
        if not isinstance(output, Tensor) or output.ndim < 2 or not output.is_floating_point():
            shown = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ArgumentError(
                f"check_parallel_model: output of {who} must be floating [b, l, ...], got {shown}"
            )
        rows, tokens = output.shape[:2]
        positions = _positions(run.positions, tokens, who)
        values = output.detach().to("cpu", torch.float64)
        flat = values.reshape(rows, tokens, prod(output.shape[2:]))
        loss, dtype = float(run.loss), torch.float64
        if isinstance(run.loss, Tensor) and run.loss.is_floating_point():
            dtype = run.loss.dtype
        rounding = abs(loss) * torch.finfo(dtype).eps
        return cls(loss, flat, positions, _gradients(run.gradients), output.dtype, rounding)


def _positions(given: Any, tokens: int, who: str) -> Ints:
    if given is None:
        return np.arange(tokens)
    if isinstance(given, Tensor):
        given = given.detach().cpu().numpy()
    positions = np.asarray(given, dtype=np.int64).reshape(-1)
    fits, name = len(positions) == tokens, f"positions of {who}"
    what = f"of the {tokens} tokens of output"
    require(fits, "check_parallel_model", name, what, len(positions))
    return positions


def _gradients(given: Any) -> dict[str, Tensor]:
    if given is None:
        return {}
    if not isinstance(given, nn.Module):
        return {name: _whole(g) for name, g in given.items() if g is not None}
    found = {}
    for name, parameter in given.named_parameters():
        if parameter.grad is not None:
            found[name] = _whole(parameter.grad)
            parameter.grad = None
    return found


def _whole(gradient: Any) -> Tensor:
    whole: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.detach().to("cpu", torch.float64)


def require_same_tokens(who: str, step: Step, base: Step) -> None:
    """Raise ArgumentError if two runs of one model have different tokens on this rank."""
    if not np.array_equal(step.positions, base.positions) or step.output.shape != base.output.shape:
        raise ArgumentError(
            f"check_parallel_model: {who} must have the same tokens in each run, got outputs "
            f"[b, l, n] of {tuple(base.output.shape)}, then {tuple(step.output.shape)}"
        )


def distance(a: Tensor, b: Tensor) -> Floats:
    """The largest difference over the last dim: [b, l, n] twice -> [b, l]; infinite where a value
    is not a number in only one of the two."""
    apart = (a - b).abs()
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, apart.nan_to_num(torch.inf))
    found: Floats = apart.amax(-1).numpy() if apart.numel() else np.zeros(apart.shape[:2])
    return found
