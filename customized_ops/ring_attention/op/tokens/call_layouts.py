"""Which rank holds which tokens of a call: its layout, named or made from lengths."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from annotations.library.cached_calls import cached

from ...core.arrays import Ints, columns
from ...core.comm import Comm
from ...core.layout import Layout
from ...core.layout import layout_tables as tables
from ...core.mask import AttnMask
from ...core.topology import Topology
from ..arguments import ArgumentError, compares_calls
from .lengths import has_data, on_host

# The users' name for Layout.balanced of the call's own mask, over the ranks of its group.
BALANCED_NAME = "balanced"
# Two names of layouts that are made from the call's own cu_seqlens, which a graph knows only when
# it runs. "zigzag by document" is Layout.zigzag over the ranks. "balanced by document:4" is the
# order of Layout.balanced over 4 ranks, whatever the number of ranks that hold it.
BY_DOCUMENT = "zigzag by document"
BALANCED = "balanced by document:"

OF_THE_WHOLE = (
    "if these are a part of the sequence, give the mask or the cumulative lengths of the whole "
    "sequence, all ranks' tokens together, the same on every rank"
)


def by_lengths(spec: str) -> bool:
    """Whether the layout is made of the call's own cu_seqlens."""
    return spec == BY_DOCUMENT or spec.startswith(BALANCED)


def layout_by_lengths(spec: str, ends: Ints, ranks: int) -> Layout:
    """The layout that such a name stands for, for documents with these cumulative lengths."""
    if spec == BY_DOCUMENT:
        return Layout.zigzag(int(ends[-1]), ranks, ends)
    parts = int(spec.removeprefix(BALANCED))

    def make() -> Layout:
        mask = AttnMask.varlen(ends, causal=True)  # as nearly all attention over documents is
        return _contiguous_parts(balanced_layout(mask, parts), ranks)

    return cached(_BALANCED, (_lengths_key(ends), parts, ranks), make, MOST_LAYOUTS)


MOST_LAYOUTS = 64
# Keys are documents and ranks, or mask, ranks and hosts. All layers of a batch share a layout.
_BALANCED: dict[tuple[Any, ...], Layout] = {}


def balanced_layout(mask: AttnMask, ranks: int, topology: Topology | None = None) -> Layout:
    """What :data:`BALANCED_NAME` stands for."""

    def make() -> Layout:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a batch that cannot be even
            return Layout.balanced(mask, ranks, topology=topology)

    return cached(_BALANCED, (mask, ranks, topology), make, MOST_LAYOUTS)


def know_layout(
    layout: Layout, documents: Ints | AttnMask, topology: Topology | None = None
) -> None:
    """Let calls find a layout that was made elsewhere: :func:`layout_by_lengths` of documents with
    these cumulative lengths, or :func:`balanced_layout` of this mask over these hosts."""
    ranks = layout.group_size
    key: tuple[Any, ...]
    if isinstance(documents, AttnMask):
        key = documents, ranks, topology
    else:
        key = _lengths_key(documents), ranks, ranks
    cached(_BALANCED, key, lambda: layout, MOST_LAYOUTS)


Attends = tuple[bool, tuple[int, int], int]  # causal, window and sink tokens
# The layouts of packed batches, as long as somebody holds them: of each list of documents and
# number of ranks every one, under its table; the latest for each kind of mask and rank; and the
# latest of all, under None, last, so that who finds it finds the others.
_OF_BATCHES: WeakValueDictionary[tuple[bytes, int, bytes | Attends | int | None], Layout]
_OF_BATCHES = WeakValueDictionary()


def know_batch(layout: Layout, ends: Ints, attends: Attends, rank: int) -> None:
    """Let calls know that documents with these cumulative lengths were packed in this layout, for
    such attention, and for this rank."""
    key = _lengths_key(ends), layout.group_size
    for which in (layout.table.tobytes(), attends, rank, None):
        _OF_BATCHES[(*key, which)] = layout


def check_batch(op: str, layout: Layout, ends: Ints, attends: Attends, rank: int) -> None:
    """Warn of a call whose documents were packed in other layouts only, for other attention, or for
    other ranks."""
    key = _lengths_key(ends), layout.group_size
    packed = _OF_BATCHES.get((*key, None))
    if packed is None:
        return
    if (*key, attends) not in _OF_BATCHES:
        causal, window, _ = attends
        warnings.warn(
            f"{op}: documents of these lengths were packed for attention with another causal or "
            f"window_size than the call has, causal={causal} and window_size={window}, so it plans "
            "again in the step; give packed_batches, or PackDocuments, those of the model",
            stacklevel=2,
        )
    if (*key, rank) not in _OF_BATCHES:
        others = (n for n in range(layout.group_size) if (*key, n) in _OF_BATCHES)
        warnings.warn(
            f"{op}: documents of these lengths were packed for rank {next(others, 'another')}, and "
            f"this is rank {rank} of the group: if q, k and v are the batch's tokens, results are "
            f"WRONG; give packed_batches, or PackDocuments, rank={rank}",
            stacklevel=2,
        )
    if (*key, layout.table.tobytes()) not in _OF_BATCHES:
        warnings.warn(
            f"{op}: documents of these lengths were packed in another layout than the call has; if "
            "q, k and v are the batch's tokens, results are WRONG without layout=batch.layout. "
            '(layout="balanced" is that layout if packed_batches, or PackDocuments, had the causal '
            "and window_size of the call, and costs=group_costs(process_group))",
            stacklevel=2,
        )


def _lengths_key(ends: Ints) -> bytes:
    """A key, without empty documents, which change no layout: graphs fill lengths up with them."""
    every = np.asarray(ends, np.int64)
    return np.concatenate([every[:1], every[1:][every[1:] != every[:-1]]]).tobytes()


def _contiguous_parts(order: Layout, ranks: int) -> Layout:
    """The tokens of rank after rank of a layout, cut over ``ranks`` as DTensor's ``Shard`` cuts."""
    bounds = tables.even_bounds(order.total, ranks)
    if np.array_equal(np.diff(bounds), order.sizes):
        return order
    _, start, stop = order.table.T
    end = np.cumsum(stop - start)
    places = np.unique(np.concatenate([[0], end, bounds]))
    of_range = np.searchsorted(end, places[:-1], side="right")
    first = stop[of_range] - (end[of_range] - places[:-1])
    rank = np.searchsorted(bounds, places[:-1], side="right") - 1
    return Layout(columns(rank, first, first + np.diff(places)), ranks)


def layout_named(spec: str, total: int, ranks: int) -> Layout:
    """The layout of a text, or a kind of layout by its name over ``total`` tokens and ``ranks``."""
    block = ":1" if spec == "striped" else ""
    return Layout.parse(spec if ":" in spec else f"{spec}:{total}:{ranks}{block}")


def layout_when_cut(spec: str, total: int, parts: int, cu_seqlens: Tensor | None) -> Layout:
    """Which of ``parts`` ranks holds which tokens of a call that an engine cuts. A layout of one
    rank is an order of tokens, and each rank holds a contiguous part of it; a layout of ``parts``
    ranks is taken as it is."""
    if not spec:
        return Layout.contiguous(total, parts)
    if by_lengths(spec):
        if cu_seqlens is None or not has_data(cu_seqlens):  # as of one document
            return Layout.zigzag(total, parts)
        return layout_by_lengths(spec, on_host(cu_seqlens), parts)
    return _parts_of_order(spec, total, parts)


@lru_cache(maxsize=64)
def _parts_of_order(spec: str, total: int, parts: int) -> Layout:
    order = layout_named(spec, total, parts)
    if order.group_size not in (1, parts) or order.total != total:
        raise ArgumentError(
            f"layout {order} is of {order.total} tokens over {order.group_size} ranks, but the "
            f"engine cuts {total} tokens over {parts}"
        )
    if order.group_size == parts:
        return order
    layout = _contiguous_parts(order, parts)
    zigzag = Layout.zigzag(total, parts)
    return zigzag if layout == zigzag else layout


def layout_of(op: str, comm: Comm, name: str, spec: str, local: int, total: int | None) -> Layout:
    """The layout of a call: ``spec`` if given, else contiguous shards of ``total`` tokens (where
    only the local length is known, of as many tokens on every rank).

    Args:
        name: what the argument is called, ``layout`` or ``k_layout``.
    """
    known_from, given = "", bool(spec)
    if total is not None:
        known_from = f", as the mask or cu_seqlens speak of {total} tokens in all"
    if spec == BALANCED_NAME:
        raise ArgumentError(
            f'{op}: {name}="balanced" is of packed documents, and for q and k of the same lengths; '
            "give Layout.balanced(mask, ranks)"
        )
    if not spec:
        if total is None:
            compare_lengths(op, comm, local)
        spec = f"contiguous:{local * comm.size if total is None else total}:{comm.size}"
    # The same object for the same text, so plans are found at once.
    layout = layout_named(spec, local * comm.size if total is None else total, comm.size)
    if layout.group_size != comm.size:
        raise ArgumentError(
            f"{op}: {name} {layout} is for {layout.group_size} ranks, but the group has {comm.size}"
        )
    if total is not None and layout.total != total:
        remedy = f"; {OF_THE_WHOLE}" if local == total and comm.size > 1 else ""
        raise ArgumentError(
            f"{op}: {name} {layout} holds {layout.total} tokens, but the sequence has {total}, by "
            f"the mask or cu_seqlens{remedy}"
        )
    if layout.sizes[comm.rank] != local:
        remedy = f"if the sequence is cut otherwise, say so with {name}=Layout.from_sizes([...])"
        if known_from:
            remedy = f"let these be of all ranks' tokens; or {remedy}"
        if local == layout.total:
            remedy = "if these are all ranks' tokens, give this rank's own: layout.shard(x, rank)"
            if known_from and not given:
                remedy = OF_THE_WHOLE
        raise ArgumentError(
            f"{op}: rank {comm.rank} of {comm.size} holds {local} tokens, but {name} {layout} "
            f"gives it {layout.sizes[comm.rank]} (sizes {list(layout.sizes)}){known_from}; {remedy}"
        )
    return layout


def refuse_layouts_of_ranks(op: str, **layouts: Layout | str | None) -> None:
    """Refuse layouts for the ranks of a group: a graph is one rank's program, and an engine that
    cuts it gives calls their layouts."""
    for name, layout in layouts.items():
        if isinstance(layout, str) or (layout is not None and layout.group_size != 1):
            raise ArgumentError(
                f"{op}: {name}={layout} is for the ranks of a group, but the call has no "
                "process_group; under an engine that cuts the tokens leave it out: after "
                "wrap_shuffle_func or wrap_maybe_shuffle it tells attention their order"
            )


def compare_lengths(op: str, comm: Comm, local: int, remedy: str | None = None) -> None:
    """Check that all ranks hold the same number of tokens. Without a layout a rank takes the others
    to hold as many as itself, and results are wrong where they do not. So ranks compare a length
    when they first meet it. In a correct program all do so in the same order; in an incorrect one a
    rank may wait for a peer that met the length before.

    Args:
        remedy: how to say what each rank holds; None: by a layout.
    """
    if comm.size == 1 or local in comm.common_lengths or compares_calls(comm):
        return  # where the ranks compare every call, they compare this too
    with comm.doing(f"{op}, where ranks compare how many tokens they hold"):
        lengths = comm.all_gather_object(local)
    if len(set(lengths)) > 1:
        if remedy is None:
            remedy = (
                f"say so with layout=Layout.from_sizes({lengths}), or with the layout that they "
                "are cut by"
            )
        raise ArgumentError(f"{op}: the ranks of the group hold {lengths} tokens; {remedy}")
    comm.common_lengths.add(local)
