"""One rank's part of packed rollouts: its tokens, and the targets that are predicted at its rows.

A *target* is a token of a rollout that counts in its loss. It is predicted at the row of the token
before it, on the rank that holds that row. Where targets of several rollouts are the same token of
the tree, they share one *pair* of a row and a token, whose log-prob is computed once. A row has
several pairs where rollouts diverge.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..core.arrays import Numbers
from ..core.layout import Layout
from ..core.mask import AttnMask
from ..core.plan import Plan
from ..op.arguments import ArgumentError, require

Values = Tensor | Sequence[float] | Numbers
MEANS = ("token", "rollout", None)
# What values may be given for, one number each.
KINDS = {
    "pair": "pair of a row and a token, as log_probs gives them",
    "target": "target of each rollout, as of_targets makes them of pairs",
    "rollout": "rollout",
    "token": "token of all rollouts",
}


@dataclass(frozen=True, eq=False)
class RolloutPart:
    """What a rank of a group needs of :class:`.PackedRollouts`, as tensors.

    The rank holds n tokens, at whose rows t targets of rollouts are predicted, as p distinct pairs.

    Attributes:
        tokens: int64[n], in the order of ``layout``.
        positions: int64[n], the position of each token in its rollouts, for rotary embeddings.
        rows: int64[p], the index among this rank's tokens at which each pair is predicted.
        targets: int64[p], the token that is predicted there.
        pair: int64[t], which pair each target belongs to. Pairs are in the order of their first
            targets, so where there are as many pairs as targets, pair i is target i.
        rollout: int64[t], the rollout of each target.
        place: int64[t], the index of each target among the tokens of all rollouts end to end.
        target_counts: int64[rollouts], targets of each rollout on all ranks.
        rollout_tokens: number of tokens of all rollouts together.
        layout: which rank holds which tokens.
        mask: which pairs attend; pass both to :func:`.wrap_masked_attn_func`.
        plan: the plan that attention will use, if it was made ahead.
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
        """The part on a device. From pinned memory the host does not wait for the copies."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> RolloutPart:
        """The part in pinned memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Any) -> RolloutPart:
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {
            name: change(value) for name, value in named.items() if isinstance(value, Tensor)
        }
        return replace(self, **changed)

    def log_probs(self, logits: Tensor) -> Tensor:
        """The log-prob of each pair: fp32[p], or fp64.

        Differentiable; as in all of these methods, the host does not wait for a device. Where the
        logits of all rows are too large, ``-chunk_linear_cross_entropy(hidden[part.rows], weight,
        part.targets, reduction="none")`` gives the same.

        Args:
            logits: [n, vocabulary] or [1, n, vocabulary], of this rank's tokens.
        Raises:
            ArgumentError: another number of rows; on the host, also a token that is not in the
                vocabulary.
        """
        op, count = "RolloutPart.log_probs", len(self.tokens)
        what = f"of the {count} tokens of this rank, [n, vocabulary] or [1, n, vocabulary]"
        require(isinstance(logits, Tensor), op, "logits", f"a tensor {what}", logits)
        rows = logits.squeeze(0) if logits.ndim == 3 else logits
        fits = rows.ndim == 2 and len(rows) == count
        require(fits, op, "logits", what, tuple(logits.shape))
        if self.targets.is_cpu and len(self.targets) and not torch.compiler.is_compiling():
            least, most = (int(each) for each in self.targets.aminmax())
            fits = least >= 0 and most < rows.shape[1]
            what = f"of a vocabulary that has the targets, {least} to {most}"
            require(fits, op, "logits", what, tuple(logits.shape))
        rows = rows if rows.dtype == torch.float64 else rows.float()
        return rows[self.rows, self.targets] - rows.logsumexp(1)[self.rows]

    def of_targets(self, log_probs: Tensor) -> Tensor:
        """[t]: values of pairs, [p], as values of each target of each rollout.

        Raises:
            ArgumentError: not a tensor of p pairs.
        """
        return self._tensor("of_targets", "pair", "log_probs", log_probs)[self.pair]

    def of_rollouts(self, values: Values) -> Tensor:
        """[t]: a value of each rollout, [rollouts], such as its advantage, repeated for each of its
        targets.

        Raises:
            ArgumentError: not as many numbers as rollouts.
        """
        return self._numbers("of_rollouts", "rollout", "values", values)[self.rollout]

    def of_tokens(self, values: Values) -> Tensor:
        """[t]: values of the tokens of all rollouts end to end, such as the log-probs that they
        were sampled with, picked for each target.

        Raises:
            ArgumentError: not as many numbers as tokens of all rollouts.
        """
        return self._numbers("of_tokens", "token", "values", values)[self.place]

    def sums(self, values: Tensor) -> Tensor:
        """[rollouts]: the sum of [t] over each rollout's targets on this rank. For log-probs, the
        sum over all ranks is the log-prob of a rollout.

        Raises:
            ArgumentError: not a tensor of t targets, but for example one of pairs.
        """
        values = self._tensor("sums", "target", "values", values)
        return values.new_zeros(len(self.target_counts)).index_add(0, self.rollout, values)

    def weights(self, weights: Values, mean: str | None = "token") -> Tensor:
        """[p]: the weight of each pair's log-prob, summed over all targets of the pair.

        Args:
            weights: floating [t], a weight for each target, as :meth:`of_rollouts` gives them.
            mean: "token" divides by the number of targets of all rollouts; "rollout" divides by the
                number of targets of a target's own rollout and by the number of rollouts, so that
                all rollouts count the same; None divides by nothing.
        Raises:
            ArgumentError: weights are not of t targets, or ``mean`` is something else.
        """
        each = self._numbers("weights", "target", "weights", weights)
        require(mean in MEANS, "RolloutPart.weights", "mean", f"one of {MEANS}", mean)
        if mean == "token":
            each = each / self.target_counts.sum().clamp(min=1)
        elif mean == "rollout":
            counts = self.target_counts[self.rollout] * len(self.target_counts)
            each = each / counts
        return each.new_zeros(len(self.rows)).index_add(0, self.pair, each)

    def loss(self, log_probs: Tensor, weights: Values, mean: str | None = "token") -> Tensor:
        """This rank's part of the policy-gradient loss: minus the sum of log-probs times weights.
        The sum over the ranks is the loss, and the same holds for gradients.

        Args:
            log_probs: [p], see :meth:`log_probs`.
            weights, mean: see :meth:`weights`; weights are taken in the dtype of log_probs.
        Raises:
            ArgumentError: log_probs is not a tensor of p pairs; also as for :meth:`weights`.
        """
        self._tensor("loss", "pair", "log_probs", log_probs)
        each = self._numbers("loss", "target", "weights", weights)
        return -(self.weights(each.to(log_probs.dtype), mean) * log_probs).sum()

    def _numbers(self, op: str, kind: str, name: str, given: Values) -> Tensor:
        """``given`` as a tensor, if it has one number for each of a kind."""
        if not isinstance(given, Tensor):
            try:
                given = torch.as_tensor(given, device=self.place.device)
            except (TypeError, ValueError, RuntimeError):  # text, rows of different lengths
                raise self._misfit(op, kind, name, reprlib.repr(given)) from None
        return self._tensor(op, kind, name, given)

    def _tensor(self, op: str, kind: str, name: str, given: Any) -> Tensor:
        """``given``, if it is a tensor with one number for each of a kind."""
        if not isinstance(given, Tensor):
            raise self._misfit(op, kind, name, reprlib.repr(given), "a tensor, ")
        if given.shape != (self._count(kind),):
            others = [each for each in KINDS if given.shape == (self._count(each),)]
            found = "".join(f", as many as there are {each}s" for each in others[:1])
            raise self._misfit(op, kind, name, f"{list(given.shape)}{found}")
        return given

    def _count(self, kind: str) -> int:
        if kind == "token":
            return self.rollout_tokens
        of_kind = {"pair": self.rows, "target": self.place, "rollout": self.target_counts}
        return len(of_kind[kind])

    def _misfit(self, op: str, kind: str, name: str, got: str, form: str = "") -> ArgumentError:
        what = f"{form}[{self._count(kind)}], one for each {KINDS[kind]}"
        return ArgumentError(f"RolloutPart.{op}: {name} must be {what}, got {got}")
