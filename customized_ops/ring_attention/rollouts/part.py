"""One rank's part of packed rollouts: its tokens, and the targets that are predicted at its rows.

A *target* is a token of a rollout that counts in its loss. It is predicted at the row of the token
before it, on the rank that holds that row. Targets of several rollouts that are the same token of
the tree are one *pair* of a row and a token: its log-prob is computed once. A row has several pairs
where rollouts part.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Layout
from ..core.mask import AttnMask
from ..core.plan import Plan
from ..op.arguments import ArgumentError

MEANS = ("token", "rollout", None)


@dataclass(frozen=True, eq=False)
class RolloutPart:
    """What a rank of a group needs of :class:`.PackedRollouts`, as tensors.

    The rank holds n tokens, at whose rows t targets of rollouts are predicted, p different pairs.

    Attributes:
        tokens: int64[n], in the order of ``layout``.
        positions: int64[n], of each token in its rollouts, for rotary embeddings.
        rows: int64[p], the place among this rank's tokens at which each pair is predicted.
        targets: int64[p], the token that is predicted there.
        pair: int64[t], which pair each target is.
        rollout: int64[t], whose target it is.
        place: int64[t], which token it is, of those of all rollouts end to end.
        target_counts: int64[rollouts], targets of each rollout on all ranks.
        rollout_tokens: of all rollouts together.
        layout: which rank holds which tokens.
        mask: what attends; pass both to :func:`.wrap_masked_attn_func`.
        plan: what attention will find, if it was made ahead.
        packed_by: the :class:`.PackRollouts` that made it, if one did.
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    targets: Tensor
    pair: Tensor
    rollout: Tensor
    place: Tensor
    target_counts: Tensor
    rollout_tokens: int
    layout: Layout
    mask: AttnMask
    plan: Plan | None = None
    packed_by: object = None

    def to(self, device: torch.device | str) -> RolloutPart:
        """The same on a device. From pinned memory the host does not wait for the copies."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> RolloutPart:
        """The same in pinned memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Any) -> RolloutPart:
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {
            name: change(value) for name, value in named.items() if isinstance(value, Tensor)
        }
        return replace(self, **changed)

    def log_probs(self, logits: Tensor) -> Tensor:
        """The log-prob of each pair: fp32[p], or fp64.

        Differentiable, and the host waits for no device, as in all of these. Where logits of all
        rows are too many, ``-chunk_linear_cross_entropy(hidden[part.rows], weight, part.targets,
        reduction="none")`` is the same.

        Args:
            logits: [n, vocabulary] or [1, n, vocabulary], of this rank's tokens.
        Raises:
            ArgumentError: another number of rows.
        """
        rows = logits.squeeze(0) if logits.ndim == 3 else logits
        if rows.ndim != 2 or len(rows) != len(self.tokens):
            raise ArgumentError(
                f"RolloutPart.log_probs: logits must be of the {len(self.tokens)} tokens of this "
                f"rank, [n, vocabulary] or [1, n, vocabulary], got {tuple(logits.shape)}"
            )
        rows = rows if rows.dtype == torch.float64 else rows.float()
        return rows[self.rows, self.targets] - rows.logsumexp(1)[self.rows]

    def of_targets(self, log_probs: Tensor) -> Tensor:
        """[t]: what is given of each pair, [p], for each target of each rollout."""
        return log_probs[self._sized("of_targets", "log_probs", log_probs, self.rows, self.pair)]

    def of_rollouts(self, values: Tensor) -> Tensor:
        """[t]: what is given of each rollout, [rollouts], such as its advantage, for each of its
        targets."""
        index = self._sized("of_rollouts", "values", values, self.target_counts, self.rollout)
        return values[index]

    def of_tokens(self, values: Tensor) -> Tensor:
        """[t]: what is given of each token of all rollouts end to end, such as the log-prob that it
        was drawn with, for each target."""
        if values.shape != (self.rollout_tokens,):
            raise ArgumentError(
                f"RolloutPart.of_tokens: values must be [{self.rollout_tokens}], one for each "
                f"token of all rollouts, got {list(values.shape)}"
            )
        return values[self.place]

    def sums(self, values: Tensor) -> Tensor:
        """[rollouts]: the sum of [t] over each rollout's targets on this rank. Of log-probs, the
        sum of all ranks' is the log-prob of a rollout."""
        index = self._sized("sums", "values", values, self.rollout, self.rollout)
        return values.new_zeros(len(self.target_counts)).index_add(0, index, values)

    def weights(self, weights: Tensor, mean: str | None = "token") -> Tensor:
        """[p]: what the log-prob of each pair counts, the sum over all targets that it is.

        Args:
            weights: floating [t], of each target, as :meth:`of_rollouts` gives them.
            mean: "token" divides by the number of targets of all rollouts; "rollout" by that of a
                target's own rollout and by the number of rollouts, so each counts as much; None
                leaves sums.
        Raises:
            ArgumentError: not of t targets, or another ``mean``.
        """
        index = self._sized("weights", "weights", weights, self.rollout, self.pair)
        if mean not in MEANS:
            raise ArgumentError(f"RolloutPart.weights: mean must be one of {MEANS}, got {mean!r}")
        if mean == "token":
            weights = weights / self.target_counts.sum().clamp(min=1)
        elif mean == "rollout":
            counts = self.target_counts[self.rollout] * len(self.target_counts)
            weights = weights / counts
        return weights.new_zeros(len(self.rows)).index_add(0, index, weights)

    def loss(self, log_probs: Tensor, weights: Tensor, mean: str | None = "token") -> Tensor:
        """This rank's part of the policy-gradient loss: minus the sum of log-probs times weights.
        The sum over the ranks is the loss, and so with gradients.

        Args:
            log_probs: [p], see :meth:`log_probs`.
            weights, mean: see :meth:`weights`; weights are taken in the dtype of log_probs.
        Raises:
            ArgumentError: not of p pairs, and as :meth:`weights`.
        """
        self._sized("loss", "log_probs", log_probs, self.rows, self.rows)
        return -(self.weights(weights.to(log_probs.dtype), mean) * log_probs).sum()

    def _sized(self, op: str, name: str, given: Tensor, like: Tensor, index: Tensor) -> Tensor:
        """``index``, where ``given`` is a row of as many as ``like``."""
        if given.shape != like.shape:
            raise ArgumentError(
                f"RolloutPart.{op}: {name} must be [{len(like)}], got {list(given.shape)}"
            )
        return index
