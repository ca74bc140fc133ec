"""Which pairs attend in a batch, as an :class:`AttnMask`.

Rows of a batch that differ, in their documents or their padding, are attended as one sequence, one
row after the other:

    [b, l, h, d]  ->  [1, b * l, h, d], and the mask of row r begins at token r * l
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...core.layout import Layout
from ...core.mask import AttnMask
from ...core.mask.slices import UNBOUNDED, Slices
from ...masked_attn import wrap_masked_attn_func
from ...op.arguments import ArgumentError
from ...ring_attn import wrap_ring_attn_func
from .pattern import TITLE, Pattern

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Rows:
    """A batch's tokens, as far as its mask goes.

    Attributes:
        q_offset, k_offset: where the first query and the first key stand in the sequence.
        segments: int64[b or 1, k_len], numbers of the documents or chunks that keys belong to, not
            falling; a query attends its own. None for one.
        q_segments: int64[b or 1, q_len], those of the queries, where they are not the keys.
        attended: bool[b or 1, k_len], False for padding; None for none.
    """

    q_len: int
    k_len: int
    q_offset: int = 0
    k_offset: int = 0
    segments: Ints | None = None
    q_segments: Ints | None = None
    attended: Flags | None = None


@dataclass(frozen=True, eq=False)
class Pairs:
    """Which pairs attend.

    Attributes:
        mask: of every row, or of all rows as one sequence.
        joined: whether it is the latter.
        window: keys before and after a token's own, where that says it all.
        layout: which rank holds which tokens of the masked sequence; None on one rank.
    """

    mask: AttnMask
    joined: bool
    window: tuple[int, int] | None
    layout: Layout | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """q [b, l, h, d], k and v [b, m, g, d] -> [b, l, h, d]; options of the ops."""
        options["layout"] = self.layout
        if self.window is not None:
            causal = self.window[1] == 0
            return wrap_ring_attn_func(q, k, v, causal=causal, window_size=self.window, **options)
        if not self.joined:
            return wrap_masked_attn_func(q, k, v, self.mask, **options)
        shape = (*q.shape[:3], v.shape[-1])
        q, k, v = (t.flatten(0, 1).unsqueeze(0) for t in (q, k, v))
        out: Any = wrap_masked_attn_func(q, k, v, self.mask, **options)
        return out.view(shape)


def find_pairs(pattern: Pattern, rows: Rows, batch: int, layout: Layout | None = None) -> Pairs:
    """The pairs of a batch; ``layout``: which rank holds which tokens of each row."""
    plain = rows.segments is None and rows.attended is None and rows.q_len == rows.k_len
    window = (pattern.left, pattern.right) if plain and not rows.q_offset else None
    each = list(_slices(pattern, rows))
    if len(each) == 1 or all(np.array_equal(each[0], other) for other in each):
        mask = AttnMask._disjoint(each[0], rows.q_len, rows.k_len)
        return Pairs(mask, False, window, layout)
    mask = AttnMask._disjoint(_joined(each, rows), batch * rows.q_len, batch * rows.k_len)
    return Pairs(mask, True, None, None if layout is None else repeated(layout, batch))


def numbered(changes: Flags) -> Ints:
    """Numbers of runs: changes[..., n] says whether token n + 1 begins a new one."""
    numbers = np.zeros((*changes.shape[:-1], changes.shape[-1] + 1), dtype=np.int64)
    np.cumsum(changes, axis=-1, out=numbers[..., 1:])
    return numbers


def _slices(pattern: Pattern, rows: Rows) -> Iterable[Slices]:
    """Of each row that may differ: a slice for each run of keys with the same queries."""
    one_segment = np.zeros((1, rows.k_len), dtype=np.int64)
    segments = one_segment if rows.segments is None else rows.segments
    attended = np.ones((1, rows.k_len), dtype=bool) if rows.attended is None else rows.attended
    shift = rows.q_offset - rows.k_offset
    low = -UNBOUNDED if pattern.left < 0 else shift - pattern.left
    high = UNBOUNDED if pattern.right < 0 else shift + pattern.right
    for n in range(max(len(segments), len(attended))):
        segment, counts = segments[min(n, len(segments) - 1)], attended[min(n, len(attended) - 1)]
        changes = (segment[1:] != segment[:-1]) | (counts[1:] != counts[:-1])
        starts = np.flatnonzero(np.concatenate([np.ones(min(rows.k_len, 1), dtype=bool), changes]))
        stops = np.append(starts[1:], rows.k_len)[: len(starts)]
        starts, stops = starts[counts[starts]], stops[counts[starts]]
        found = np.empty((len(starts), 6), dtype=np.int64)
        found[:, 0], found[:, 1] = 0, rows.q_len
        if rows.segments is not None:
            queries = segment
            if rows.q_segments is not None:
                queries = rows.q_segments[min(n, len(rows.q_segments) - 1)]
            found[:, 0] = np.searchsorted(queries, segment[starts], "left")
            found[:, 1] = np.searchsorted(queries, segment[starts], "right")
        found[:, 2], found[:, 3], found[:, 4], found[:, 5] = starts, stops, low, high
        yield found


def _joined(each: list[Slices], rows: Rows) -> Slices:
    q, k = rows.q_len, rows.k_len
    by = np.array([q, q, k, k, k - q, k - q])
    return np.concatenate([slices + n * by for n, slices in enumerate(each)])


def repeated(layout: Layout, batch: int) -> Layout:
    """The layout of a batch's rows one after the other."""
    ranks, starts, stops = np.tile(layout.table, (batch, 1)).T
    by = np.repeat(np.arange(batch) * layout.total, len(layout.table))
    table = np.stack([ranks, starts + by, stops + by], axis=1)
    return Layout(table[np.argsort(ranks, kind="stable")], layout.group_size)


# Documents and chunks: which tokens belong together, as non-decreasing numbers.


def on_host(tensor: Tensor) -> Ints:
    """An integer or bool tensor as int64 on the host."""
    return tensor.detach().cpu().numpy().astype(np.int64)


def check_ends(title: str, ends: Ints, total: int) -> None:
    """Raise ArgumentError for cumulative lengths that do not rise from 0 to ``total``."""
    if ends[0] != 0 or ends[-1] != total or (np.diff(ends) < 0).any():
        raise ArgumentError(
            f"{title}: cu_seq_lens_q must rise from 0 to the {total} tokens, got {ends.tolist()}"
        )


def begins(position_ids: Ints, attended: Flags | None) -> Flags:
    """[b, l - 1]: whether token n + 1 begins a document, by transformers' rule: its position is not
    the one after token n's. Beside padding positions mean nothing."""
    changes = np.diff(position_ids, axis=-1) != 1
    return changes if attended is None else changes & attended[:, 1:] & attended[:, :-1]


def documents_of(position_ids: Ints, attended: Flags | None) -> Ints | None:
    """Numbers of documents, [b or 1, l]; None where there is one.

    Raises:
        ArgumentError: padding as well, where transformers' implementations differ.
    """
    changes = begins(position_ids, attended)
    if not changes.any():
        return None
    if attended is not None:
        row, at = np.argwhere(changes)[0]
        raise ArgumentError(
            f"{TITLE}: position_ids restart in row {row} at token {at + 1}, and attention_mask has "
            "padding. With a mask eager attention attends across documents, flash attention does "
            "not; pack without padding and leave out attention_mask"
        )
    return numbered(changes)


def segments_of(
    pattern: Pattern,
    documents: Ints | None,
    position_ids: Ints | None,
    attended: Flags | None,
    length: int,
    offsets: tuple[int, int] = (0, 0),
    q_len: int | None = None,
) -> tuple[Ints | None, Ints | None]:
    """Numbers of what attends together of keys, and of queries where these are not the keys.

    Args:
        position_ids: [b or 1, length], where there are documents.
        length: of keys. offsets: where queries and keys begin. q_len: queries, where not all keys.
    """
    if not pattern.chunk:
        return documents, None
    if documents is not None:
        assert position_ids is not None
        chunks = position_ids // pattern.chunk
        return numbered((np.diff(documents) != 0) | (np.diff(chunks) != 0)), None
    padding = np.zeros((1, 1), dtype=np.int64)
    if pattern.left_padding is not None:
        padding = on_host(pattern.left_padding)[:, None]
    elif attended is not None:
        padding = (np.cumsum(attended, axis=-1) == 0).sum(axis=-1, keepdims=True)
    keys = (np.arange(length) + offsets[1] - padding) // pattern.chunk
    if q_len is None:
        return keys, None
    return keys, (np.arange(q_len) + offsets[0] - padding) // pattern.chunk
