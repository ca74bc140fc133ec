"""How documents are assigned to ranks.

They stay whole where that is even. Else prefix trees are assigned by subtrees, and others by hosts,
if there are several. Else documents stay in order where that is even, or one is cut in two, or the
largest of them are split over a few ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...arrays import Bools, Ints, columns
from ...topology import Topology
from ..layout_tables import even_bounds, in_order
from .cut_document import cut_document
from .document_areas import DocumentAreas, Weighted, imbalance_of
from .host_documents import documents_on_hosts
from .split_documents import LEAST_PART, split_documents
from .subtrees import assign_subtrees
from .whole_documents import AS_EVEN, whole_documents

# Pairs of 32 heads that take less time than what a split document adds: another kernel call, what
# it sends and what it merges. So many more pairs on one rank are better than split documents.
CALL_PAIRS = 2 << 20
# Pairs of a rank up to which the host may take longer for a pass than kernels do, so that what it
# need not work out anew counts more than some imbalance: 1.2 ms of 32 heads on an H200.
SHORT_PAIRS = 12 << 20
# Up to this largest area over the mean, a search is not worth it: it takes seconds for many ranks.
ENOUGH = 1.05
# Documents with windows, whose stretches differ in area, are cut if they have at least these
# fractions of a rank's tokens: the long ones first, as each further part takes a window more of
# keys.
RAMPS_APART = (0.5, 0.1)
# ``even_half`` for what a host holds of a document: rows of a stretch differ little.
EVEN_PART = 0.005


class DocumentAssignment(NamedTuple):
    """Documents on ranks.

    ``table`` is int64[n, 3] ranges of tokens (rank, start, stop), by rank, with each rank's parts
    of split documents first. ``imbalance`` is the largest rank's area over the mean. ``good`` says
    that there is no point in looking for a better assignment.
    """

    table: Ints
    imbalance: float
    good: bool


def assign_documents(
    weighted: Weighted, total: int, group_size: int, topology: Topology | None = None
) -> DocumentAssignment | None:
    """Assign documents so that ranks hold as many tokens as if all were in order. They go to hosts
    first, if there are several and the result is even, and then to ranks within each host.

    Args:
        weighted: normalised slices of a mask over ``total`` tokens, and its weight, above 0.
    Returns:
        None where nothing is attended.
    """
    documents = DocumentAreas.of(weighted, total)
    if not documents.area.any():
        return None
    bounds = even_bounds(total, group_size)
    sizes = np.diff(bounds)
    mean = documents.area.sum() / group_size
    enough = max(AS_EVEN, 1 + CALL_PAIRS * sum(weight for _, weight in weighted) / mean)
    table = whole_documents(documents, sizes, enough)
    if table is not None and (imbalance := imbalance_of(weighted, table, group_size)) <= enough:
        return DocumentAssignment(table, imbalance, True)
    if len(weighted) == 1:
        as_large = topology is not None and len(set(topology.hosts)) == 1
        hosts = len(topology.hosts) if topology is not None and as_large else 1
        table = assign_subtrees(weighted[0][0], total, sizes, enough, hosts)
        if table is not None:
            return DocumentAssignment(table, imbalance_of(weighted, table, group_size), True)
    if topology is not None and len(topology.hosts) > 1:
        table = _by_hosts(weighted, documents, sizes, topology, enough)
        if (imbalance := imbalance_of(weighted, table, group_size)) <= max(ENOUGH, enough):
            return DocumentAssignment(table, imbalance, True)
    # A document in order is on a limited number of ranks: one of them attends at least this.
    least = (documents.area / (2 + (documents.tokens - 2) // sizes[0])).max()
    if least <= AS_EVEN * mean:
        table = in_order(bounds)
        if (imbalance := imbalance_of(weighted, table, group_size)) <= AS_EVEN:
            return DocumentAssignment(table, imbalance, True)
    short = mean <= SHORT_PAIRS * sum(weight for _, weight in weighted)
    if short and (table := cut_document(weighted, documents, sizes, ENOUGH)) is not None:
        return DocumentAssignment(table, imbalance_of(weighted, table, group_size), True)
    several = len(documents.area) > 1  # for one sequence a search is worth while
    good = ENOUGH if several else AS_EVEN
    table = split_documents(documents, sizes)
    imbalance = imbalance_of(weighted, table, group_size)
    for share in RAMPS_APART * several:
        if imbalance <= good:
            break
        other = split_documents(documents.ramps_apart(weighted, share * sizes.max()), sizes)
        if (found := imbalance_of(weighted, other, group_size)) < imbalance:
            table, imbalance = other, found
    return DocumentAssignment(table, imbalance, imbalance <= good)


def _by_hosts(
    weighted: Weighted, documents: DocumentAreas, sizes: Ints, topology: Topology, enough: float
) -> Ints:
    """A table of documents on ranks with which little crosses between hosts. What a host holds of
    each document is a document of its own there; a stretch is two, one from the front and one from
    the end.

    Parts of a document that several hosts hold are spread over all ranks of a host, so that each
    sends and receives its part of what crosses."""
    host_of, hosts = topology.host_of, len(topology.hosts)
    ranks = np.bincount(host_of, sizes > 0, minlength=hosts)
    areas = ranks * (documents.area.sum() / ranks.sum())
    tokens = np.bincount(host_of, sizes, minlength=hosts).astype(np.int64)
    held = documents_on_hosts(documents, tokens, areas)
    parts = DocumentAreas.between(weighted, np.append(held[:, 1], documents.bounds[-1]))
    document = documents.bounds.searchsorted(held[:, 1], side="right") - 1
    crosses, tokens = _on_several_hosts(held, document), documents.tokens[document]
    tables = []
    for host in range(hosts):
        on_host, room = held[:, 0] == host, sizes[host_of == host]
        long = tokens >= LEAST_PART * len(room)  # a few rows may need all of it
        dealt = [_dealt(held[n, 1:], room) for n in np.flatnonzero(on_host & crosses & long)]
        own = np.flatnonzero(on_host & ~(crosses & long))
        mine = parts.some(own, EVEN_PART)
        table = _on_ranks(mine, room, enough) if len(own) else np.zeros((0, 3), dtype=np.int64)
        # From tokens of the host to those of the sequence.
        part = np.searchsorted(mine.bounds, table[:, 1], side="right") - 1
        table[:, 1:] += (held[own, 1] - mine.bounds[:-1])[part][:, None]
        table = np.concatenate([*dealt, table])
        table[:, 0] += int(np.searchsorted(host_of, host))
        tables.append(table)
    rank, start, stop = np.concatenate(tables).T
    n = np.searchsorted(documents.bounds, start, side="right") - 1
    is_whole = stop - start == documents.tokens[n]
    return columns(rank, start, stop)[np.lexsort((start, is_whole, rank))]


def _on_several_hosts(held: Ints, document: Ints) -> Bools:
    """bool[n]: which ranges (host, start, stop), int64[n, 3], are of documents on several hosts;
    ``document``: int64[n], of each."""
    first, last = (np.full(document.max() + 1, value) for value in (held[:, 0].max(), 0))
    np.minimum.at(first, document, held[:, 0])
    np.maximum.at(last, document, held[:, 0])
    return (first < last)[document]


def _dealt(stretch: Ints, room: Ints) -> Ints:
    """A table of ``stretch``, (start, stop), on ranks in proportion to their ``room``, which it
    takes up. Each rank has an early and a late part, so that areas are as even as tokens.
    """
    start, stop = stretch.tolist()
    shares = np.diff(np.append(0, (stop - start) * room.cumsum() // room.sum()))
    room -= shares
    early = shares - np.append(shares[:-1] // 2, 0)  # the two parts of the last rank are one
    ends = start + np.cumsum(np.concatenate([early, (shares - early)[::-1]]))
    ranks = np.arange(len(room))
    rank = np.concatenate([ranks, ranks[::-1]])
    table = columns(rank, np.append(start, ends[:-1]), ends)
    return table[table[:, 1] < table[:, 2]]


def _on_ranks(documents: DocumentAreas, sizes: Ints, enough: float) -> Ints:
    """A table of what a host holds on its ranks, with documents whole where that is even."""
    if documents.area.any():
        table = whole_documents(documents, sizes, enough)
        if table is not None:
            of = documents.bounds.searchsorted(table[:, 1])
            area = np.bincount(table[:, 0], documents.area[of], minlength=len(sizes))
            if area.max() <= enough * area.mean():
                return table
    return split_documents(documents, sizes)
