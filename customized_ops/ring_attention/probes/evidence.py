"""What ranks saw of both models, gathered; the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..core.arrays import Ints
from .model_run import PADDING, Floats, Step, distance
from .shards import Shards

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
COARSE = 5e-2  # for other dtypes
SILENT = 1e-2  # share of the largest difference of equal losses; a smaller one may be noise


class Gradient(NamedTuple):
    """One parameter's gradient compared with that of one process; inf and nan if shapes differ or
    it is missing."""

    error: float
    largest: float
    product: float  # inner product of the two
    square: float  # squared norm of the gradient of one process


class Seen(NamedTuple):
    """What one rank saw on the batch itself. ``error`` [b, l]: how far each of its tokens is from
    the model alone; ``noise``: how far apart two runs were, alone and over the group; ``rounding``:
    the resolution of the losses' dtype."""

    positions: Ints
    rows: int
    tokens_alone: int
    error: Floats
    largest: float
    tolerance: float
    finite: tuple[bool, bool]
    noise: tuple[float, float]
    losses: tuple[float, float]
    gradients: Mapping[str, Gradient]
    rounding: float = 0.0

    @property
    def product(self) -> float:
        """The inner product of all gradients with those of one process."""
        return sum(g.product for g in self.gradients.values())

    @property
    def square(self) -> float:
        """The squared norm of all gradients of one process."""
        return sum(g.square for g in self.gradients.values())


class Trial(NamedTuple):
    """One token was changed: how much the outputs of all tokens changed [b, l]."""

    place: int
    row: int
    alone: Floats
    parallel: Floats


class Label(NamedTuple):
    """One label was changed: by how much each rank's loss changed, alone and over the group."""

    place: int
    losses: Sequence[tuple[float, float]]

    @property
    def want(self) -> float:
        """By how much the loss changes alone."""
        return self.losses[0][0]

    @property
    def got(self) -> float:
        """By how much the loss changes over the group, as the mean over the ranks' own losses."""
        return float(np.mean([got for _, got in self.losses]))


@dataclass(frozen=True, eq=False)
class Evidence:
    """Everything that the ranks saw.

    Attributes:
        size: rows and tokens of the batch.
        documents: cumulative lengths, or None.
        local_positions: how far the outputs over the group are from those of the model alone with
            positions that each rank counts from 0; None if that was not tried.
        tolerance: the largest relative difference.
    """

    size: tuple[int, int]
    shards: Shards
    documents: Sequence[int] | None
    seen: Sequence[Seen]
    trials: Sequence[Trial]
    labels: Sequence[Label]
    local_positions: float | None
    tolerance: float

    @property
    def near(self) -> float:
        """Largest difference of outputs that still count as equal."""
        return self.tolerance * max(each.largest for each in self.seen)

    @property
    def near_loss(self) -> float:
        """Largest difference of losses that still count as equal."""
        return self.tolerance * max(1e-3, *(abs(each.losses[0]) for each in self.seen))

    @property
    def common_factor(self) -> float | None:
        """The factor between the loss and every gradient on each rank and those of one process;
        None if there is no common factor, or if there are no gradients."""
        (want, got), gradients = self.seen[0].losses, self.seen[0].gradients
        if not gradients or not want or not 0 < got / want < np.inf:
            return None
        factor = got / want
        allowed = self.tolerance * max(g.largest for g in gradients.values())
        for each in self.seen:
            alike = abs(each.losses[1] - got) <= self.near_loss
            alike &= abs(each.product - factor * each.square) <= self.tolerance * each.square
            for g in each.gradients.values():
                alike &= abs(g.error - abs(factor - 1) * g.largest) <= allowed
            if not alike:
                return None
        return factor

    @property
    def tried_borders(self) -> bool:
        """Whether a label that counts was changed right after a shard border; True if there are no
        borders."""
        borders = self.shards.borders()
        return not borders or any(each.place in borders and each.want for each in self.labels)

    def counts_alike(self, want: float, got: float) -> bool:
        """Whether a label changes the loss as much as it should. A label that changes nothing at
        all is lost, however small its change should be, unless rounding explains it."""
        rounding = max(each.rounding for each in self.seen)
        lost = got == 0 and abs(want) > max(SILENT * self.near_loss, 4 * rounding)
        return bool(abs(got - want) <= self.near_loss) and not lost

    @property
    def error(self) -> Floats:
        """How far the outputs of all tokens [b, l] are from those of the model alone."""
        return self.shards.whole([each.error for each in self.seen], self.size)

    @property
    def loud(self) -> float:
        """The largest change over the group that may be noise."""
        return 4 * max(each.noise[1] for each in self.seen)

    @property
    def quiet(self) -> float:
        """The same for the model alone."""
        return 4 * max(each.noise[0] for each in self.seen)

    def extra(self, trial: Trial) -> Ints:
        """(row, token) of outputs that changed although alone they do not."""
        return np.argwhere((trial.parallel > self.loud) & (trial.alone <= self.quiet))

    def lost(self, trial: Trial) -> Ints:
        """(row, token) of outputs that did not change although alone they clearly do."""
        return np.argwhere((trial.parallel <= self.loud) & (trial.alone > self.near))

    def document(self, token: int) -> int:
        """The number of a token's document."""
        return 0 if self.documents is None else int(np.searchsorted(self.documents, token, "right"))


def seen_of(alone: Step, parallel: Step, noise: Sequence[float]) -> Seen:
    """What this rank saw of both models."""
    return Seen(
        parallel.positions,
        parallel.output.shape[0],
        alone.output.shape[1],
        errors(parallel, alone),
        float(alone.output.abs().nan_to_num().max()),
        TOLERANCES.get(alone.precision, COARSE),
        (bool(alone.output.isfinite().all()), bool(parallel.output.isfinite().all())),
        (float(noise[0]), float(noise[1])),
        (alone.loss, parallel.loss),
        _compared(alone.gradients, parallel.gradients),
        max(alone.rounding, parallel.rounding),
    )


def errors(parallel: Step, alone: Step) -> Floats:
    """How far each token [b, l] of a run is from the same token of the whole sequence; infinite for
    padding, and where shapes do not fit."""
    rows, count, width = parallel.output.shape
    found = np.full((rows, count), np.inf)
    own = parallel.positions != PADDING
    at = parallel.positions[own]
    inside = bool(((at >= 0) & (at < alone.output.shape[1])).all())
    if inside and (rows, width) == (alone.output.shape[0], alone.output.shape[2]):
        mine, want = torch.from_numpy(np.flatnonzero(own)), torch.from_numpy(at)
        found[:, own] = distance(parallel.output[:, mine], alone.output[:, want])
    return found


def _compared(
    alone: Mapping[str, torch.Tensor], parallel: Mapping[str, torch.Tensor]
) -> dict[str, Gradient]:
    if not alone:
        return {}
    found = {}
    for name, want in alone.items():
        got = parallel.get(name)
        largest, square = float(want.abs().max()), float((want * want).sum())
        if got is None or got.shape != want.shape:
            found[name] = Gradient(np.inf, largest, np.nan, square)
            continue
        apart = (got - want).abs().nan_to_num(torch.inf)
        found[name] = Gradient(float(apart.max()), largest, float((got * want).sum()), square)
    return found
