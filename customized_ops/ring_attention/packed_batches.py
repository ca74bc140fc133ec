"""Batches of packed documents, with all that attention needs to know about their lengths.

    for batch in packed_batches(loader, ranks=8, rank=rank, heads=(32, 8)):
        model(batch.tokens, batch.positions, batch.cu_seqlens, batch.layout)

Lengths that change with every batch need a new layout and a new plan each time. These are made
here, in the background, while the model computes on the previous batch.

.. include:: docs/packed_training.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batches_ahead import made_ahead, require_planned_for, require_same
from .core.cost import H200, CostModel
from .core.layout import Layout
from .core.mask import AttnMask
from .core.plan import Plan
from .core.plan.heads import grouped_heads
from .core.plan.plan import expect
from .core.run.call_pairs import prepare
from .core.topology import Topology
from .op.arguments import flag_of, require, window_bounds
from .op.mask_source import Problem
from .op.tokens.call_layouts import BALANCED, know_batch, know_layout, layout_by_lengths
from .op.tokens.token_rows import IGNORED, labelled_rows
from .op.window_source import know_mask
from .ring_attn_varlen import RING_ATTN_VARLEN

READ_BY_MODELS = "tokens", "targets", "positions"
TENSORS = *READ_BY_MODELS, "cu_seqlens"  # of a batch
LayoutOf = Callable[[AttnMask, int, Topology | None], Layout]
PACKED_LAYOUTS: Mapping[str, LayoutOf] = {
    "balanced": lambda mask, ranks, topology: Layout.balanced(mask, ranks, topology=topology),
    "contiguous": lambda mask, ranks, topology: Layout.contiguous(mask.q_len, ranks),
}


@dataclass(frozen=True)
class PackedBatch:
    """One rank's part of documents that lie end to end, or all of their tokens.

    Attributes:
        tokens: int64 [l], this rank's, in the order of ``layout``; or all, in their own order.
        targets: int64 [l], the token that follows each one in its document. For the last token of a
            document, and where the next one is not a target, it is -100, which cross entropy
            ignores.
        positions: int64 [l], the place of each token in its document, for rotary embeddings.
        cu_seqlens: int32 [documents + 1], cumulative lengths of all documents.
        layout: which rank holds which tokens; pass it to attention with ``cu_seqlens``.
        plan: the plan that attention will find, for its report and its picture.
        target_count: targets of all ranks that are not ignored. The loss of the batch is the sum
            over ranks of ``cross_entropy(..., reduction="sum") / max(target_count, 1)``. The count
            may be 0, as of documents of one token, or of labels that are all -100.
        packed_by: the object that packed it; None for a batch that was made by hand.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    layout: Layout
    plan: Plan
    target_count: int
    packed_by: PackDocuments | None = None

    def __post_init__(self) -> None:
        """Let attention find the mask and the layout, wherever the batch was made."""
        if (pack := self.packed_by) is not None:
            ends = self.cu_seqlens.numpy()
            know_mask(ends.tolist(), pack.causal, pack.window_size, self.plan.mask)
            if pack.layout == "balanced":
                documents = ends if pack.whole else self.plan.mask
                know_layout(self.layout, documents, pack.costs.topology)
            if not pack.whole:
                attends = pack.causal, pack.window_size, 0
                know_batch(self.layout, ends, attends, pack.rank)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle tensors as bytes: otherwise each would come from a DataLoader's worker as a file
        of its own. Tensors on a device arrive on the host."""
        arrays = [getattr(self, name).cpu().numpy() for name in TENSORS]
        return _received, (arrays, self.layout, self.plan, self.target_count, self.packed_by)

    def pin_memory(self) -> PackedBatch:
        """The same batch with what :meth:`to` copies in pinned memory, so that it does not wait. A
        DataLoader with ``pin_memory=True`` calls this."""
        pinned: dict[str, Any] = {n: getattr(self, n).pin_memory() for n in READ_BY_MODELS}
        return replace(self, **pinned)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with the tensors that a model reads on ``device``. ``cu_seqlens`` stay on
        the host, where they are read."""
        read: Any = {n: getattr(self, n).to(device, non_blocking=True) for n in READ_BY_MODELS}
        return replace(self, **read)


def _received(arrays: Sequence[Any], *others: Any) -> PackedBatch:
    tokens, targets, positions, cu_seqlens = map(torch.from_numpy, arrays)
    return PackedBatch(tokens, targets, positions, cu_seqlens, *others)


@dataclass(frozen=True)
class PackDocuments:
    """Packs a list of documents into a :class:`PackedBatch`. As the ``collate_fn`` of a DataLoader
    it lets the workers plan ahead. Every rank must get the same documents in the same order.

    Attributes:
        ranks, rank: number of ranks in the group that attends together, and this rank in it.
        heads: query and key heads of the model.
        causal, window_size: as :func:`.wrap_ring_attn_varlen_func` takes them.
        layout: "balanced" gives ranks the same work; "contiguous" leaves tokens in order.
        whole: give every rank all tokens in order, for a consumer that cuts them itself: a module
            of ``parallelize``, with ``layout=module.plan.packed_layout``.
        costs: the rates by which plans are chosen, and the hosts, which "balanced" layouts depend
            on too. Give those of the group, :func:`.group_costs`, or attention plans again in the
            step. (With ``whole``, "balanced" is the order of an engine, which does not know hosts.)
        head_dim: of the model. Attention of other heads plans again in the step.
        itemsize: bytes of an element of q: 4 for attention in fp32 on GPUs, else keep the default.
    """

    ranks: int
    rank: int
    heads: tuple[int, int]
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    layout: str = "balanced"
    whole: bool = False
    costs: CostModel = H200
    head_dim: int = 128
    itemsize: int = 2

    def __post_init__(self) -> None:
        # Pairs of any type, such as lists from a config, become tuples that are found by value.
        op, names = "packed_batches", tuple(PACKED_LAYOUTS)
        heads, window = grouped_heads(op, self.heads), window_bounds(op, self.window_size)
        flags = {name: flag_of(op, name, getattr(self, name)) for name in ("causal", "whole")}
        vars(self).update(heads=heads, window_size=window, **flags)
        require(self.layout in names, op, "layout", f"one of {names}", self.layout)
        require_planned_for(op, self)

    def __call__(self, documents: Sequence[Any]) -> PackedBatch:
        """Pack documents.

        Args:
            documents: each the ids of its tokens, as a tensor, an array or a list of integers; or a
                dict with ``input_ids`` and ``labels``, the ids again, but -100 for tokens that are
                not targets, such as those of a prompt. An ``attention_mask`` of ones is ignored.
        Raises:
            ValueError: there are no documents, one is not a row of integers or a dict of such rows,
                or all tokens together are fewer than the ranks of a module that is to cut them
                (``whole``).
        """
        each, labels = labelled_rows("packed_batches", "documents", documents)
        if not each:
            raise ValueError("packed_batches: a batch has no documents")
        if self.whole and (total := sum(map(len, each))) < self.ranks:
            raise ValueError(
                f"packed_batches: a batch of {total} tokens cannot be cut over {self.ranks} ranks, "
                "as whole=True is for; leave it out, or join it with another"
            )
        started = perf_counter()
        lengths = np.array([len(row) for row in each])
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        mask = AttnMask.varlen(bounds, causal=self.causal, window=self.window_size)
        if self.whole and self.layout == "balanced":  # as engines lay out documents
            layout = layout_by_lengths(f"{BALANCED}{self.ranks}", bounds, self.ranks)
        else:
            layout = PACKED_LAYOUTS[self.layout](mask, self.ranks, self.costs.topology)
        dims = self.head_dim, self.head_dim
        problem, sizes = Problem(mask, layout, layout), (self.heads, dims)
        plan = RING_ATTN_VARLEN.plan(problem, *sizes, costs=self.costs, itemsize=self.itemsize)
        prepare(plan, self.rank)  # made here, not in the step
        expect(plan, perf_counter() - started)
        tokens = np.concatenate(each)
        targets = np.append(np.concatenate(labels)[1:], IGNORED)
        targets[bounds[1:][lengths > 0] - 1] = IGNORED
        positions = np.arange(len(tokens)) - np.repeat(bounds[:-1], lengths)
        here = slice(len(tokens)) if self.whole else layout.positions(self.rank)
        count = int((targets[: len(tokens)] != IGNORED).sum())
        cu_seqlens = torch.from_numpy(bounds.astype(np.int32))
        return PackedBatch(
            torch.from_numpy(tokens[here]),
            torch.from_numpy(targets[here]),
            torch.from_numpy(positions[here]),
            cu_seqlens,
            layout,
            plan,
            count,
            self,
        )

    def made(self, given: Sequence[Any] | PackedBatch) -> PackedBatch:
        """The batch of what a loader gives: packed here, or taken if it is a batch already."""
        return self.take(given) if isinstance(given, PackedBatch) else self(given)

    def take(self, batch: PackedBatch) -> PackedBatch:
        """Accept a batch that a DataLoader packed, if it is what this object would have made.

        Raises:
            ValueError: the batch is packed for other ranks, or for other attention.
        """
        if batch.packed_by is not None:
            require_same(batch.packed_by, self, "packed_batches")
        return batch


def packed_batches(
    loader: Iterable[Sequence[Any] | PackedBatch],
    *,
    ranks: int,
    rank: int,
    heads: tuple[int, int],
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    layout: str = "balanced",
    whole: bool = False,
    costs: CostModel = H200,
    head_dim: int = 128,
    itemsize: int = 2,
    ahead: int = 2,
) -> Iterator[PackedBatch]:
    """Batches of packed documents, planned ahead in a thread.

    Args:
        loader: an iterable of lists of documents, as :meth:`PackDocuments.__call__` takes them,
            such as a DataLoader with ``collate_fn=list``; the same on every rank. Or an iterable of
            :class:`PackedBatch`, which are passed on: a DataLoader whose ``collate_fn`` is
            :class:`PackDocuments` with the same arguments.
        ahead: how many batches are made before they are asked for.

    The other arguments are those of :class:`PackDocuments`.

    Raises:
        ValueError: ``ahead`` is not positive, ``loader`` gives batches that were packed with other
            arguments, or :class:`PackDocuments` raises it. What ``loader`` raises is raised where
            its batch is due.
    """
    sizes = head_dim, itemsize
    pack = PackDocuments(ranks, rank, heads, causal, window_size, layout, whole, costs, *sizes)
    return made_ahead(loader, pack.made, ahead, "packed_batches")
