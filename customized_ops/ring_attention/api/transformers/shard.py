"""Cutting a batch for a transformers model, and adding up the ranks' losses and gradients.

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

from ...core.arrays import Ints
from ...core.comm import Comm
from ...core.comm.comm_groups import GroupLike, group_comm
from ...core.index_table import IndexTable
from ...core.layout import Layout
from ...core.mask import AttnMask
from ...op.arguments import ArgumentError, require
from ...op.tokens.call_layouts import BALANCED_NAME, balanced_layout
from ...op.tokens.lengths import know_values, on_host
from ...op.tokens.token_rows import IGNORED
from ...packed_batches import PackedBatch
from .batch_mask import begins, check_ends, host_copy
from .cut import Cut, mark_part, sequence_parallel

CUT_ENTRIES = ("input_ids", "inputs_embeds", "labels", "shift_labels")
WHOLE_ENTRIES = ("position_ids", "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k")
KEPT_ENTRIES = ("num_items_in_batch", "use_cache")
UNNEEDED_ENTRIES = ("max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True, eq=False)
class Shard:
    """A rank's part of a batch.

    Attributes:
        inputs: the model's arguments by name: its tokens, their position_ids, and, if the batch
            has labels, what makes the model's loss this rank's share of the mean over the batch.
        layout: which tokens of each row each rank holds.
        whole: position_ids and attention_mask of the whole sequence, on the host; None if there
            is no such mask.
    """

    inputs: Mapping[str, Any]
    layout: Layout
    whole: tuple[Tensor, Tensor | None]
    group: GroupLike
    dropout_seed: int | None

    def context(self) -> AbstractContextManager[Cut]:
        """The context in which the model's forward runs; see :func:`sequence_parallel`."""
        positions, attended = self.whole
        return sequence_parallel(
            self.group,
            self.layout,
            position_ids=positions,
            attention_mask=attended,
            dropout_seed=self.dropout_seed,
        )


def shard_batch(
    batch: Mapping[str, Any] | PackedBatch,
    group: GroupLike,
    layout: str | Layout | None = None,
    *,
    dropout_seed: int | None = None,
) -> Shard:
    """This rank's part of a batch of a causal language model. Nothing moves.

    Labels are shifted before they are cut, so each token's label is the next one of the whole
    sequence, and losses are divided by the count of the whole batch.

    With a :class:`.PackedBatch`, or if cu_seq_lens_q is on the host and position_ids are left out,
    the host never waits for a device, neither here nor in the model's attention. Otherwise it waits
    here, once for each of position_ids and attention_mask that is on a device.

    Args:
        batch: the same whole batch on every rank: input_ids [b, l] or inputs_embeds [b, l, d].
            Optional: labels [b, l], or shift_labels, already shifted; position_ids, attention_mask
            (2-dimensional) and cu_seq_lens_q and _k as in transformers; seq_idx beside one of
            these. Or what
            :func:`.packed_batches` gave this rank: its own tokens, or all.
        group: a ProcessGroup, its global ranks in increasing order, or a Comm.
        layout: ``"zigzag"``, which None stands for, ``"contiguous"``, ``"striped"``; or
            ``"balanced"``, :meth:`.Layout.balanced` of causal attention over the documents, the
            same in all rows; or a Layout of l tokens. A PackedBatch has its own: give None, or the
            same.
        dropout_seed: see :func:`sequence_parallel`.
    Raises:
        ValueError: an entry is not one of these, or not of l tokens; or a rank has no token.
    """
    comm = group_comm(group)
    given: Mapping[str, Any]
    if isinstance(batch, PackedBatch):
        where, is_cut = _layout_of_packed(batch, layout, comm)
        given, positions, padding = _entries(batch), _positions(batch.cu_seqlens), None
    else:
        total = _tokens_of(batch)
        positions, padding = _position_ids(batch, total), batch.get("attention_mask")
        where, is_cut, given = _layout_of(positions, layout, comm), False, batch
    if 0 in where.sizes:
        raise ArgumentError(
            f"shard_batch: rank {where.sizes.index(0)} has no token in {where}; transformers' "
            "models need one, so join the batch with another"
        )
    whole = {name: given[name] for name in CUT_ENTRIES if given.get(name) is not None}
    kept = {name: given[name] for name in KEPT_ENTRIES if name in given}
    if "labels" in whole and "shift_labels" not in whole:
        whole["shift_labels"] = F.pad(whole["labels"], (0, 1), value=IGNORED)[:, 1:]
    if "labels" in whole and "num_items_in_batch" not in kept:
        kept["num_items_in_batch"] = (whole["shift_labels"] != IGNORED).sum()
    mine = positions[:, where.positions(comm.rank)]
    if given.get("position_ids") is not None:
        whole["position_ids"] = given["position_ids"]
    cut = {n: t if is_cut else where.shard(t, comm.rank).contiguous() for n, t in whole.items()}
    if "position_ids" not in cut:
        cut["position_ids"] = IndexTable(mine).on(next(iter(cut.values())).device)
    know_values(cut["position_ids"], mine)
    # Some models pass the first one on to attention, some the other.
    for each in (cut["position_ids"], kept.get("num_items_in_batch")) if comm.size > 1 else ():
        mark_part(each)
    inputs = {"use_cache": False, **cut, **kept}
    told = torch.from_numpy(positions), None if padding is None else padding.cpu()
    return Shard(inputs, where, told, group, dropout_seed)


def _layout_of_packed(
    batch: PackedBatch, layout: str | Layout | None, comm: Comm
) -> tuple[Layout, bool]:
    """A batch's layout, and whether the batch has only this rank's tokens."""
    where, held = batch.layout, len(batch.tokens)
    if layout not in (None, where) or where.group_size != comm.size:
        raise ArgumentError(
            f"shard_batch: the PackedBatch is laid out over {where.group_size} ranks as {where}; "
            f"the group has {comm.size}, and layout is {layout!r}: give packed_batches ranks and "
            "layout instead"
        )
    if held not in (where.total, where.sizes[comm.rank]):
        raise ArgumentError(
            f"shard_batch: the PackedBatch has {held} tokens, but rank {comm.rank} holds "
            f"{where.sizes[comm.rank]} of {where.total} in its layout {where}"
        )
    return where, held < where.total


def _entries(batch: PackedBatch) -> dict[str, Tensor]:
    """The entries of a batch under transformers' names."""
    targets, count = batch.targets[None], max(batch.target_count, 1)
    return {
        "input_ids": batch.tokens[None],
        "labels": targets,
        "shift_labels": targets,
        "position_ids": batch.positions[None],
        "num_items_in_batch": torch.full((), count, device=targets.device),
    }


def _tokens_of(batch: Mapping[str, Any]) -> int:
    """How many tokens each row has, after all entries were checked."""
    kind = "a mapping of tensors by name, or a PackedBatch"
    require(isinstance(batch, Mapping), "shard_batch", "batch", kind, batch)
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if tokens is None:
        raise ArgumentError("shard_batch: the batch has neither input_ids nor inputs_embeds")
    require(isinstance(tokens, Tensor), "shard_batch", "tokens", "a tensor", tokens)
    shapes = "[b, l], or [b, l, d] embedded"
    require(tokens.ndim >= 2, "shard_batch", "tokens", shapes, tuple(tokens.shape))
    _check_entries(batch, tokens.shape[1])
    return int(tokens.shape[1])


def _layout_of(positions: Ints, layout: str | Layout | None, comm: Comm) -> Layout:
    total = positions.shape[1]
    if isinstance(layout, Layout):
        if layout.total != total:
            raise ArgumentError(
                f"shard_batch: layout is of {layout.total} tokens, the batch's rows have {total}"
            )
        return layout
    if layout == BALANCED_NAME:
        return _balanced(positions, comm)
    kinds = {k: getattr(Layout, k) for k in ("zigzag", "contiguous", "striped")}
    one = "or a Layout, as Layout.balanced(mask, ranks) makes one"
    known = f"{', '.join(kinds)}, {BALANCED_NAME} {one}"
    require(layout is None or layout in kinds, "shard_batch", "layout", known, layout)
    made: Layout = kinds[layout or "zigzag"](total, comm.size)
    return made


def _balanced(positions: Ints, comm: Comm) -> Layout:
    """The balanced layout for causal attention over the documents of a row."""
    ends = [
        np.flatnonzero(np.concatenate([[True], row, [True]])) for row in begins(positions, None)
    ]
    if any(not np.array_equal(each, ends[0]) for each in ends):
        raise ArgumentError(
            "shard_batch: layout='balanced' is of rows with the same documents; give "
            "Layout.balanced([(mask, 1), ...], ranks) of the masks of all rows"
        )
    mask = AttnMask.varlen(ends[0], causal=True)
    return balanced_layout(mask, comm.size, comm.costs.topology)


def _check_entries(batch: Mapping[str, Any], total: int) -> None:
    known = (*CUT_ENTRIES, *WHOLE_ENTRIES, *KEPT_ENTRIES, *UNNEEDED_ENTRIES)
    for name, value in batch.items():
        if name not in known and value is not None:
            raise ArgumentError(
                f"shard_batch: the batch has {name}, and how to cut it is not known; known are "
                f"{', '.join(known)}"
            )
        of_tokens = name in (*CUT_ENTRIES, "position_ids", "attention_mask") and value is not None
        if of_tokens:
            require(isinstance(value, Tensor), "shard_batch", name, "a tensor", value)
            fits = value.ndim >= 2 and value.shape[1] == total
            require(fits, "shard_batch", name, f"of {total} tokens a row", tuple(value.shape))
    if batch.get("seq_idx") is not None and all(
        batch.get(name) is None for name in ("position_ids", "cu_seq_lens_q")
    ):
        raise ArgumentError(
            "shard_batch: seq_idx alone does not name the documents; give position_ids that begin "
            "anew, or cu_seq_lens_q"
        )
    if batch.get("shift_labels") is not None and batch.get("labels") is None:
        raise ArgumentError(
            "shard_batch: shift_labels without labels, which make models return a loss"
        )


def _position_ids(batch: Mapping[str, Any], total: int) -> Ints:
    """Position ids of the whole sequence, [b or 1, l]; they restart where documents begin."""
    given, ends = batch.get("position_ids"), batch.get("cu_seq_lens_q")
    known = None if given is None else host_copy(given)
    if ends is None:
        return np.arange(total)[None] if known is None else known
    other = batch.get("cu_seq_lens_k")
    ends = torch.as_tensor(ends)
    bounds = on_host(ends)
    if other is not None and not np.array_equal(bounds, on_host(torch.as_tensor(other))):
        raise ArgumentError("shard_batch: cu_seq_lens_q and cu_seq_lens_k name different documents")
    check_ends("shard_batch", bounds, total)
    made = _positions(ends)
    if known is None:
        return made
    if not np.array_equal(np.diff(known) != 1, np.diff(made) != 1):
        raise ArgumentError("shard_batch: cu_seq_lens_q and position_ids name different documents")
    return known


def _positions(cu_seqlens: Tensor) -> Ints:
    """[1, l], the position of each token in its document."""
    ends = on_host(cu_seqlens)
    return (np.arange(ends[-1]) - np.repeat(ends[:-1], np.diff(ends)))[None]


def sum_over_ranks(share: Tensor, group: GroupLike) -> Tensor:
    """The sum of the ranks' shares of a loss, the same on every rank; without a gradient.

    Raises:
        ArgumentError: the share is not a tensor.
    """
    require(isinstance(share, Tensor), "sum_over_ranks", "share", "a tensor", share)
    return group_comm(group).all_reduce(share.detach().clone(), "sum")


def sum_gradients(
    parameters: torch.nn.Module | Iterable[torch.nn.Parameter], group: GroupLike
) -> None:
    """Add up the gradients of all ranks, in place, after the backward of their shares. For a model,
    these are the gradients of all its parameters.

    A parameter without a gradient on this rank takes part with zeros; one that needs none does not.

    Raises:
        ArgumentError: neither a module nor tensors.
    """
    comm = group_comm(group)
    found = parameters.parameters() if isinstance(parameters, torch.nn.Module) else parameters
    alone = isinstance(found, Tensor) or not isinstance(found, Iterable)
    each: list[Any] = [found] if alone else list(found)
    fits = all(isinstance(parameter, Tensor) for parameter in each)
    require(fits, "sum_gradients", "parameters", "a module, or parameters", parameters)
    for parameter in each:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            comm.all_reduce(parameter.grad, "sum")
