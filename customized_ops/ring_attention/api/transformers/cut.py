"""How the tokens of a transformers model are cut over ranks: the layout, documents and padding.

A model that runs on a rank's tokens sees neither where documents begin nor what is padding, so both
are given for the whole sequence, once per batch:

    with sequence_parallel(group, layout, position_ids=whole):
        model(input_ids=mine, position_ids=layout.shard(whole, rank))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Bools, Ints
from ...core.comm.comm_groups import GroupLike, group_comm
from ...core.layout import Layout
from ...op.arguments import ArgumentError, checked, require
from .batch_mask import BatchMask, BatchTokens, batch_mask, host_copy
from .mask_function import TITLE, MaskDescription


@dataclass(frozen=True, eq=False)
class Cut:
    """A batch whose tokens are cut over ranks.

    Attributes:
        position_ids: int64[b or 1, total], of the whole sequence; where they do not increase by
            one, a document begins.
        attended: bool[b, total], False for padding; None if there is none.
        dropout_seed: the seed of attention's dropout, to which each layer adds its own index.
    """

    group: GroupLike
    layout: Layout
    position_ids: Ints
    attended: Bools | None = None
    dropout_seed: int | None = None
    asked: set[str] = field(default_factory=set)  # "mask", once a layer or a model made one
    made: dict[int, Any] = field(default_factory=dict)  # by rows: arguments of recurrent layers

    @property
    def positions(self) -> Ints:
        """[b or 1, l], this rank's position ids."""
        rank = group_comm(self.group).rank
        return self.position_ids[:, self.layout.positions(rank)]

    def batch_mask(self, description: MaskDescription, batch: int) -> BatchMask:
        """The mask of the whole batch."""
        tokens = BatchTokens.of_positions(self.layout.total, self.position_ids, self.attended)
        # The padding that a model knows of is that of its own tokens.
        return batch_mask(replace(description, left_padding=None), tokens, batch, self.layout)

    def options(self, module: torch.nn.Module, dropout: float) -> dict[str, Any]:
        """The options of the ops for a layer; each layer has a dropout seed of its own."""
        options: dict[str, Any] = {"process_group": self.group}
        if dropout and self.dropout_seed is not None:
            layer = int(getattr(module, "layer_idx", 0) or 0)
            options["dropout_seed"] = self.dropout_seed + layer
        return options

    def check(self, shape: torch.Size, position_ids: Tensor | None) -> None:
        """Raise ArgumentError if a layer's input is not this rank's part of the batch: if it has
        another number of tokens or rows, or other position ids. ``shape``: of q, [b, l, h, d].
        """

        def look() -> None:
            mine = self.positions
            rows = {1, len(self.position_ids), 1 if self.attended is None else len(self.attended)}
            if shape[1] != mine.shape[1] or not rows <= {1, shape[0]}:
                raise ArgumentError(
                    f"{TITLE}: {shape[0]} rows of {shape[1]} tokens, but sequence_parallel was "
                    f"given {max(rows)} of which this rank holds {mine.shape[1]} tokens, by "
                    f"layout {self.layout}"
                )
            if position_ids is None or position_ids.ndim != 2:
                return
            given = host_copy(position_ids)
            if given.shape[1] != mine.shape[1]:
                raise ArgumentError(
                    f"{TITLE}: position_ids are of {given.shape[1]} tokens, but this rank holds "
                    f"{mine.shape[1]}; pass those of its tokens to the model"
                )
            if not (given == mine).all():
                raise ArgumentError(
                    f"{TITLE}: position_ids begin with {given[0, :4].tolist()}, but the tokens of "
                    f"this rank, by layout {self.layout}, have {mine[0, :4].tolist()}; pass "
                    "position_ids to the model, and those of the whole sequence to "
                    "sequence_parallel where they are not 0, 1, 2, ..."
                )

        checked(TITLE, self.group, look)


_current: ContextVar[Cut | None] = ContextVar("seqshard_cut", default=None)


@contextmanager
def within(cut: Cut | None) -> Iterator[None]:
    """Inside, ``cut`` is the cut of the running model's inputs."""
    token = _current.set(cut)
    try:
        yield
    finally:
        _current.reset(token)


def running_cut() -> Cut | None:
    """The cut of the running model's inputs; None for whole inputs."""
    return _current.get()


def current_cut() -> Cut | None:
    """The same, called by attention; records that attention has asked, as every cut model must."""
    cut = running_cut()
    if cut is not None:
        cut.asked.add("mask")
    return cut


def mark_part(given: Any) -> None:
    """Mark a tensor that a model passes on to its layers as belonging to a rank's part."""
    if isinstance(given, Tensor):
        given._seqshard_part = True  # type: ignore[attr-defined]


def refuse_part(*given: Any) -> None:
    """Raise ArgumentError if a layer that runs outside :func:`sequence_parallel` receives a tensor
    that :func:`.shard.shard_batch` marked."""
    if any(getattr(each, "_seqshard_part", False) for each in given):
        raise ArgumentError(
            f"{TITLE}: these tokens are a rank's part of a batch, cut by shard_batch; run the "
            "model within `with shard.context():`, or each rank attends its own tokens alone"
        )


@contextmanager
def sequence_parallel(
    group: GroupLike,
    layout: Layout,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    dropout_seed: int | None = None,
) -> Iterator[Cut]:
    """Inside, models with ``attn_implementation="seqshard"`` run on this rank's tokens.

    The backward may run outside. Pass the model its own tokens and their ``position_ids``, and no
    ``attention_mask``.

    Args:
        group: a ProcessGroup, its global ranks in increasing order, or a Comm.
        layout: which tokens of each row each rank holds.
        position_ids: [b or 1, total], of the whole sequence, the same on every rank; None is 0, 1,
            2, ... Where they do not increase by one, a document begins, which attends only to
            itself.
        attention_mask: [b, total], of the whole sequence; 0 for padding.
        dropout_seed: for attention's dropout, the same on every rank and different at each step.
            None draws from torch's generator, which then must have the same seed on all ranks.
    Raises:
        ValueError: the group, the layout and the shapes do not fit.
    """
    ranks = group_comm(group).size
    fits = isinstance(layout, Layout) and layout.group_size == ranks
    require(fits, "sequence_parallel", "layout", f"a Layout over {ranks} ranks", layout)
    whole = _of_total("position_ids", position_ids, layout)
    attended = _of_total("attention_mask", attention_mask, layout)
    cut = Cut(
        group,
        layout,
        np.arange(layout.total)[None] if whole is None else whole,
        None if attended is None or attended.all() else attended != 0,
        dropout_seed,
    )
    with within(cut):
        yield cut
    if not cut.asked:
        raise ArgumentError(
            "sequence_parallel: no attention ran over the ranks: call register(), and give the "
            "model attn_implementation='seqshard', or each rank attends its own tokens alone"
        )


def _of_total(name: str, given: Tensor | None, layout: Layout) -> Ints | None:
    if given is None:
        return None
    if given.ndim != 2 or given.shape[1] != layout.total:
        raise ArgumentError(
            f"sequence_parallel: {name} must be [b, {layout.total}], of the whole sequence as "
            f"layout {layout} has it, got {tuple(given.shape)}"
        )
    return host_copy(given)
