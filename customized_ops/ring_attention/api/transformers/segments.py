"""Documents and chunks of a batch: which tokens belong together, as non-decreasing numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...op.arguments import ArgumentError
from .pairs import Flags, Ints, numbered
from .pattern import Pattern


def on_host(tensor: Tensor) -> Ints:
    """An integer or bool tensor as int64 on the host."""
    return tensor.detach().cpu().numpy().astype(np.int64)


def check_ends(title: str, ends: Ints, total: int) -> None:
    """Raise ArgumentError for cumulative lengths that do not rise from 0 to ``total``."""
    if ends[0] != 0 or ends[-1] != total or (np.diff(ends) < 0).any():
        raise ArgumentError(
            f"{title}: cu_seq_lens_q must rise from 0 to the {total} tokens, got {ends.tolist()}"
        )


def begins(position_ids: Ints, attended: Flags | None) -> npt.NDArray[np.bool_]:
    """[b, l - 1]: whether token n + 1 begins a document, by transformers' rule: its position is not
    the one after token n's. Beside padding positions mean nothing."""
    changes = np.diff(position_ids, axis=-1) != 1
    return changes if attended is None else changes & attended[:, 1:] & attended[:, :-1]


def documents_of(position_ids: Ints, attended: Flags | None, title: str) -> Ints | None:
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
            f"{title}: position_ids restart in row {row} at token {at + 1}, and attention_mask has "
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
