"""Cutting a batch for a transformers model, and adding up what its ranks found.

shard = shard_batch(batch, group)             every rank passes the same whole batch
with shard.context():
    share = model(**shard.inputs).loss        this rank's share of the batch's mean loss
share.backward()
sum_gradients(model.parameters(), group)      as one process has them
loss = sum_over_ranks(share, group)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.comm.comm_groups import GroupLike, group_comm
from ...core.layout import Layout
from ...op.arguments import ArgumentError
from ...op.tokens.lengths import on_host
from .batch_mask import check_ends
from .cut import Cut, mark_part, sequence_parallel

IGNORED = -100  # the label of tokens that do not count
CUT_ENTRIES = ("input_ids", "inputs_embeds", "labels", "shift_labels")
WHOLE_ENTRIES = ("position_ids", "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k")
KEPT_ENTRIES = ("num_items_in_batch", "use_cache")
UNNEEDED_ENTRIES = ("max_length_q", "max_length_k")


@dataclass(frozen=True, eq=False)
class Shard:
    """A rank's part of a batch.

    Attributes:
        inputs: the model's arguments by name: its tokens, their position_ids, and, where the batch
            has labels, what makes the model's loss this rank's share of the mean over the batch.
        layout: which tokens of each row each rank holds.
        whole: position_ids and attention_mask of the whole sequence, None where there are none.
    """

    inputs: Mapping[str, Any]
    layout: Layout
    whole: tuple[Tensor | None, Tensor | None]
    group: GroupLike
    dropout_seed: int | None

    def context(self) -> AbstractContextManager[Cut]:
        """What the model's forward runs in; see :func:`sequence_parallel`."""
        positions, attended = self.whole
        return sequence_parallel(
            self.group,
            self.layout,
            position_ids=positions,
            attention_mask=attended,
            dropout_seed=self.dropout_seed,
        )


def shard_batch(
    batch: Mapping[str, Any],
    group: GroupLike,
    layout: str | Layout = "zigzag",
    *,
    dropout_seed: int | None = None,
) -> Shard:
    """This rank's part of a batch of a causal language model. Nothing moves.

    Labels are shifted before they are cut, so each token's label is the next one of the whole
    sequence, and the count that losses are divided by is that of the whole batch.

    Args:
        batch: the same whole batch on every rank: input_ids [b, l] or inputs_embeds [b, l, d]; if
            there, labels [b, l], or shift_labels, shifted already; position_ids, attention_mask
            (2-dimensional) and cu_seq_lens_q and _k as transformers has them.
        group: a ProcessGroup, its global ranks in increasing order, or a Comm.
        layout: ``"zigzag"``, ``"contiguous"``, ``"striped"``, or a Layout of l tokens.
        dropout_seed: see :func:`sequence_parallel`.
    Raises:
        ValueError: an entry that is not one of these, or that is not of l tokens; names it.
    """
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if tokens is None:
        raise ArgumentError("shard_batch: the batch has neither input_ids nor inputs_embeds")
    if tokens.ndim < 2:
        raise ArgumentError(
            f"shard_batch: tokens must be [b, l], or [b, l, d] embedded, got {tuple(tokens.shape)}"
        )
    total = tokens.shape[1]
    _check_entries(batch, total)
    comm = group_comm(group)
    if isinstance(layout, str):
        kinds = {k: getattr(Layout, k) for k in ("zigzag", "contiguous", "striped")}
        if layout not in kinds:
            raise ArgumentError(
                f"shard_batch: layout must be {', '.join(kinds)} or a Layout, as "
                f"Layout.balanced(mask, ranks) makes one, got {layout!r}"
            )
        layout = kinds[layout](total, comm.size)
    assert isinstance(layout, Layout)
    whole = {name: batch[name] for name in CUT_ENTRIES if batch.get(name) is not None}
    positions = _position_ids(batch, total, tokens.device)
    whole["position_ids"] = positions
    kept = {name: batch[name] for name in KEPT_ENTRIES if name in batch}
    if "labels" in whole:
        shifted = F.pad(whole["labels"], (0, 1), value=IGNORED)[:, 1:]
        whole.setdefault("shift_labels", shifted)
        counted = (whole["shift_labels"] != IGNORED).sum()
        kept.setdefault("num_items_in_batch", counted)
    cut = {name: layout.shard(t, comm.rank).contiguous() for name, t in whole.items()}
    # Some models hand the one on to attention, some the other.
    for each in (cut["position_ids"], kept.get("num_items_in_batch")) if comm.size > 1 else ():
        mark_part(each)
    inputs = {"use_cache": False, **cut, **kept}
    return Shard(inputs, layout, (positions, batch.get("attention_mask")), group, dropout_seed)


def _check_entries(batch: Mapping[str, Any], total: int) -> None:
    known = (*CUT_ENTRIES, *WHOLE_ENTRIES, *KEPT_ENTRIES, *UNNEEDED_ENTRIES)
    for name, value in batch.items():
        if name not in known and value is not None:
            raise ArgumentError(
                f"shard_batch: the batch has {name}, and how to cut it is not known; known are "
                f"{', '.join(known)}"
            )
        of_tokens = name in (*CUT_ENTRIES, "position_ids", "attention_mask") and value is not None
        if of_tokens and (value.ndim < 2 or value.shape[1] != total):
            raise ArgumentError(
                f"shard_batch: {name} must be of {total} tokens a row, got {tuple(value.shape)}"
            )
    if batch.get("shift_labels") is not None and batch.get("labels") is None:
        raise ArgumentError(
            "shard_batch: shift_labels without labels, which make models return a loss"
        )


def _position_ids(batch: Mapping[str, Any], total: int, device: torch.device) -> Tensor:
    """Of the whole sequence, [b or 1, l]; they restart where documents begin."""
    given, ends = batch.get("position_ids"), batch.get("cu_seq_lens_q")
    if ends is None:
        return torch.arange(total, device=device)[None] if given is None else given
    other = batch.get("cu_seq_lens_k")
    bounds = on_host(torch.as_tensor(ends))
    if other is not None and not np.array_equal(bounds, on_host(torch.as_tensor(other))):
        raise ArgumentError("shard_batch: cu_seq_lens_q and cu_seq_lens_k name different documents")
    check_ends("shard_batch", bounds, total)
    local = np.arange(total) - np.repeat(bounds[:-1], np.diff(bounds))
    made = torch.from_numpy(local)[None].to(device)
    if given is None:
        return made
    if not torch.equal(torch.diff(given) != 1, torch.diff(made) != 1):
        raise ArgumentError("shard_batch: cu_seq_lens_q and position_ids name different documents")
    return given


def sum_over_ranks(share: Tensor, group: GroupLike) -> Tensor:
    """The sum of the ranks' shares of a loss, the same on every rank; without a gradient."""
    return group_comm(group).all_reduce(share.detach().clone(), "sum")


def sum_gradients(
    parameters: torch.nn.Module | Iterable[torch.nn.Parameter], group: GroupLike
) -> None:
    """Add up the gradients of all ranks, in place, after the backward of their shares; of a model,
    of all its parameters.

    A parameter without a gradient on this rank takes part with zeros; those that need none do not.
    """
    comm = group_comm(group)
    found = parameters.parameters() if isinstance(parameters, torch.nn.Module) else parameters
    for parameter in found:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            comm.all_reduce(parameter.grad, "sum")
