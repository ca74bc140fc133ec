"""Which pairs attend in a batch, as an :class:`AttnMask`.

If rows of a batch differ in their documents or padding, all rows are attended as one sequence, one
row after the other:

    [b, l, h, d]  ->  [1, b * l, h, d], and the mask of row r begins at token r * l
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor

from ...core.arrays import Bools, Ints, columns
from ...core.layout import Layout
from ...core.mask import AttnMask
from ...core.mask.intervals import runs
from ...core.mask.slices import UNBOUNDED, Slices
from ...masked_attn import wrap_masked_attn_func
from ...op.arguments import ArgumentError
from ...op.tokens.lengths import known_values
from ...ring_attn import wrap_ring_attn_func
from .mask_function import TITLE, MaskDescription


@dataclass(frozen=True, eq=False)
class BatchTokens:
    """What a batch's mask needs to know about its tokens. There are documents only where the
    queries are the keys.

    Attributes:
        q_offset, k_offset: positions of the first query and the first key in the sequence.
        documents: int64[b or 1, k_len], the number of each key's document, nondecreasing; None for
            one document.
        position_ids: int64[b or 1, q_len], of the queries; None if they are not known.
        attended: bool[b or 1, k_len], False for padding; None if there is none.
    """

    q_len: int
    k_len: int
    q_offset: int = 0
    k_offset: int = 0
    documents: Ints | None = None
    position_ids: Ints | None = None
    attended: Bools | None = None

    @classmethod
    def of_positions(
        cls, length: int, position_ids: Ints | None, attended: Bools | None = None
    ) -> BatchTokens:
        """The tokens of whole rows, whose documents are found from position ids."""
        documents = documents_of(position_ids, attended)
        return cls(length, length, 0, 0, documents, position_ids, attended)

    @property
    def queries_are_keys(self) -> bool:
        """Whether queries and keys are the same tokens; False if a cache holds further keys."""
        return self.q_len == self.k_len and self.q_offset == self.k_offset

    def segments(self, description: MaskDescription) -> tuple[Ints | None, Ints | None]:
        """The segments of keys and queries: chunks of documents. A query attends only to its own.

        Returns:
            int64[b or 1, k_len], the number of each key's segment, nondecreasing; None for one.
            int64[b or 1, q_len], those of the queries; None where they are the keys.
        """
        if not description.chunk:
            return self.documents, None
        if self.documents is not None:
            assert self.position_ids is not None
            chunks = self.position_ids // description.chunk
            return numbered((np.diff(self.documents) != 0) | (np.diff(chunks) != 0)), None
        padding = np.zeros((1, 1), dtype=np.int64)
        if description.left_padding is not None:
            padding = host_copy(description.left_padding)[:, None]
        elif self.attended is not None:
            padding = (np.cumsum(self.attended, axis=-1) == 0).sum(axis=-1, keepdims=True)
        keys = (np.arange(self.k_len) + self.k_offset - padding) // description.chunk
        if self.queries_are_keys:
            return keys, None
        return keys, (np.arange(self.q_len) + self.q_offset - padding) // description.chunk


@dataclass(frozen=True, eq=False)
class BatchMask:
    """Which pairs of a batch attend.

    Attributes:
        mask: the mask of every row, or of all rows as one sequence.
        joined: whether the mask is of all rows as one sequence.
        window: keys before and after a token's own, if a window describes the mask completely.
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


def batch_mask(
    description: MaskDescription, tokens: BatchTokens, batch: int, layout: Layout | None = None
) -> BatchMask:
    """The mask of a batch; ``layout``: which rank holds which tokens of each row."""
    q_len, k_len = tokens.q_len, tokens.k_len
    segments = tokens.segments(description)
    plain = segments[0] is None and tokens.attended is None and q_len == k_len
    window = (description.left, description.right) if plain and not tokens.q_offset else None
    rows = list(_slices_of_rows(description, tokens, *segments))
    if len(rows) == 1 or all(np.array_equal(rows[0], other) for other in rows):
        return BatchMask(AttnMask._disjoint(rows[0], q_len, k_len), False, window, layout)
    by = np.array([q_len, q_len, k_len, k_len, k_len - q_len, k_len - q_len])
    joined = np.concatenate([slices + n * by for n, slices in enumerate(rows)])
    mask = AttnMask._disjoint(joined, batch * q_len, batch * k_len)
    return BatchMask(mask, True, None, None if layout is None else repeated(layout, batch))


def numbered(changes: Bools) -> Ints:
    """Numbers of runs: changes[..., n] says whether token n + 1 begins a new one."""
    numbers = np.zeros((*changes.shape[:-1], changes.shape[-1] + 1), dtype=np.int64)
    np.cumsum(changes, axis=-1, out=numbers[..., 1:])
    return numbers


def _slices_of_rows(
    description: MaskDescription,
    tokens: BatchTokens,
    k_segments: Ints | None,
    q_segments: Ints | None,
) -> Iterator[Slices]:
    """For each row that may differ, one slice for each run of keys with the same queries."""
    k_len, shift = tokens.k_len, tokens.q_offset - tokens.k_offset
    segments = np.zeros((1, k_len), dtype=np.int64) if k_segments is None else k_segments
    attended = np.ones((1, k_len), dtype=bool) if tokens.attended is None else tokens.attended
    low = -UNBOUNDED if description.left < 0 else shift - description.left
    high = UNBOUNDED if description.right < 0 else shift + description.right
    for n in range(max(len(segments), len(attended))):
        segment, counts = _row(segments, n), _row(attended, n)
        changes = (segment[1:] != segment[:-1]) | (counts[1:] != counts[:-1])
        heads, lasts = runs(changes, k_len)
        kept = counts[heads]
        starts, stops = heads[kept], lasts[kept] + 1
        found = np.empty((len(starts), 6), dtype=np.int64)
        found[:, 0], found[:, 1] = 0, tokens.q_len
        if k_segments is not None:
            queries = segment if q_segments is None else _row(q_segments, n)
            found[:, 0] = np.searchsorted(queries, segment[starts], "left")
            found[:, 1] = np.searchsorted(queries, segment[starts], "right")
        found[:, 2], found[:, 3], found[:, 4], found[:, 5] = starts, stops, low, high
        yield found


def _row(table: npt.NDArray[Any], n: int) -> npt.NDArray[Any]:
    """Row n of a table [b or 1, l]."""
    return table[min(n, len(table) - 1)]


def repeated(layout: Layout, batch: int) -> Layout:
    """The layout of a batch's rows one after the other."""
    ranks, starts, stops = np.tile(layout.table, (batch, 1)).T
    by = np.repeat(np.arange(batch) * layout.total, len(layout.table))
    table = columns(ranks, starts + by, stops + by)
    return Layout(table[np.argsort(ranks, kind="stable")], layout.group_size)


def host_copy(tensor: Tensor) -> Ints:
    """An integer or bool tensor as int64 on the host. Unless it was made from known values, it is
    copied at each call, unlike ``cu_seqlens``: replaying a CUDA graph changes a tensor that a model
    makes, but not the tensor's version."""
    known = known_values(tensor)
    return tensor.detach().cpu().numpy().astype(np.int64) if known is None else known


def check_ends(title: str, ends: Ints, total: int) -> None:
    """Raise ArgumentError for cumulative lengths that do not rise from 0 to ``total``."""
    if ends[0] != 0 or ends[-1] != total or (np.diff(ends) < 0).any():
        raise ArgumentError(
            f"{title}: cu_seq_lens_q must rise from 0 to the {total} tokens, got {ends.tolist()}"
        )


def begins(position_ids: Ints, attended: Bools | None) -> Bools:
    """[b, l - 1]: whether token n + 1 begins a document. By transformers' rule it does if its
    position is not that of token n plus 1. Positions of padding are ignored."""
    changes = np.diff(position_ids, axis=-1) != 1
    return changes if attended is None else changes & attended[:, 1:] & attended[:, :-1]


def warn_of_part(position_ids: Ints, attended: Bools | None) -> None:
    """Warn, where there are several ranks, of tokens that seem to be a rank's part of a sequence
    and are attended alone: some document begins at a position above 1, which padding has."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    firsts = np.pad(begins(position_ids, attended), ((0, 0), (1, 0)), constant_values=True)
    if (np.where(firsts, position_ids, 0) > 1).any():
        warnings.warn(
            f"{TITLE}: position_ids begin above 1, as of a rank's part of a sequence, but these "
            "tokens attend one another alone. If other ranks have the others, results are WRONG: "
            "run the model inside `with shard_batch(batch, group).context():`, or "
            "sequence_parallel. If each rank has whole sequences, ignore this",
            stacklevel=2,
        )


def documents_of(position_ids: Ints | None, attended: Bools | None) -> Ints | None:
    """The document number of each token, [b or 1, l]; None if there is one document.

    Raises:
        ArgumentError: there is padding as well, for which transformers' implementations differ.
    """
    if position_ids is None or not (changes := begins(position_ids, attended)).any():
        return None
    if attended is not None:
        row, at = np.argwhere(changes)[0]
        raise ArgumentError(
            f"{TITLE}: position_ids restart in row {row} at token {at + 1}, and attention_mask has "
            "padding. With a mask eager attention attends across documents, flash attention does "
            "not; pack without padding and leave out attention_mask"
        )
    return numbered(changes)
