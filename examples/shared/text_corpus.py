"""Real text found on every machine: the sources and the documentation of Python's standard library.

Text is bytes (`VOCAB_SIZE` 256), so no tokenizer and no download is needed. Two steps::

    load_documents()  ->  documents, uint8 arrays  ->  PackedText(...).batch(step)  ->  Batch

A packed batch is one row of several documents, whose lengths are long-tailed, as in training on
long contexts::

    tokens         d  e  f  _  f  (  i  m  p  o  r  t  W  h  i  l  e
    targets        e  f  _  f  (  .  m  p  o  r  t  .  h  i  l  e  .      . is IGNORE_INDEX
    position_ids   0  1  2  3  4  5  0  1  2  3  4  5  0  1  2  3  4
    cu_seqlens     0                 6                 12             17 17 17
"""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics as DOCUMENTATION_TOPICS

import numpy as np
import numpy.typing as npt
import torch

VOCAB_SIZE = 256
IGNORE_INDEX = -100  # what torch's cross-entropy ignores by default
MIN_PIECE_TOKENS = 16
MAX_DOCUMENTS = 64

# Piece lengths are lognormal: half are under a 16th of the sequence, one in a hundred is all of it.
MEDIAN_PIECE_FRACTION = 1 / 16
PIECE_LENGTH_SIGMA = 1.2

# Not standard library, tests, or (pydoc_data) the documentation topics in their quoted form.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"}
)

Bytes = npt.NDArray[np.uint8]


def _source_paths(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _read(source: Path | str) -> bytes:
    """The bytes of a file or of a documentation text; empty if the file cannot be read."""
    if isinstance(source, str):
        return source.encode()
    try:
        return source.read_bytes()
    except OSError:
        return b""


def load_documents(max_bytes: int = 4_000_000, seed: int = 0) -> list[Bytes]:
    """Documents with `max_bytes` bytes in total, or with all available; the last is cut to fit.

    Each standard-library module and each topic of Python's built-in help is one document, a
    non-empty uint8 array. The order is shuffled by `seed`, and is the same for the same Python.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    help_texts = [DOCUMENTATION_TOPICS[name] for name in sorted(DOCUMENTATION_TOPICS)]
    sources = [*_source_paths(Path(sysconfig.get_path("stdlib"))), *help_texts]
    documents = []
    free_bytes = max_bytes
    for index in np.random.default_rng(seed).permutation(len(sources)):
        data = _read(sources[index])[:free_bytes]
        if data:
            documents.append(np.frombuffer(data, dtype=np.uint8))
            free_bytes -= len(data)
        if free_bytes == 0:
            break
    return documents


@dataclass(frozen=True, eq=False)
class Batch:
    """One training row. Its shapes depend only on the sequence length."""

    tokens: torch.Tensor
    """int64 [1, seq_len]"""
    targets: torch.Tensor
    """int64 [1, seq_len]: the next byte of the document, IGNORE_INDEX at its last token"""
    position_ids: torch.Tensor
    """int64 [1, seq_len]: positions within each document"""
    cu_seqlens: torch.Tensor
    """int32 [max_documents + 1]: document bounds, 0 to seq_len, then seq_len repeated"""


class PackedText:
    """Batches of exactly `seq_len` tokens, drawn from `documents`.

    A batch depends only on `seed` and its step, so every rank makes the same one without
    communication. Documents of fewer than `MIN_PIECE_TOKENS` bytes are left out.
    """

    def __init__(self, documents: list[Bytes], seq_len: int, seed: int = 0) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        kept = [document for document in documents if len(document) >= MIN_PIECE_TOKENS]
        if not kept:
            raise ValueError(
                f"none of the {len(documents)} documents has the {MIN_PIECE_TOKENS} bytes needed"
            )
        self.seq_len = seq_len
        self.seed = seed
        self.max_documents = min(MAX_DOCUMENTS, -(-seq_len // MIN_PIECE_TOKENS))
        self._text = np.concatenate(kept)
        self._document_starts = np.cumsum([0, *map(len, kept)])

    def batch(self, step: int, packed: bool = True) -> Batch:
        """Batch number `step`: several documents packed, or one stretch of text as one document.

        A stretch runs on from document to document, and its last target is the true next byte.
        """
        rng = np.random.default_rng((self.seed, step))
        if packed:
            return self._batch(self._draw_pieces(rng))
        text = self._stretch(int(rng.integers(len(self._text))), self.seq_len + 1)
        batch = self._batch([text[:-1]])
        batch.targets[0, -1] = int(text[-1])
        return batch

    def _stretch(self, start: int, length: int) -> Bytes:
        """`length` bytes of the concatenated documents; the first one follows the last one."""
        return self._text.take(np.arange(start, start + length), mode="wrap")

    def _draw_pieces(self, rng: np.random.Generator) -> list[Bytes]:
        """Pieces of `seq_len` bytes in all, each from within one document.

        The last of `max_documents` pieces takes what is left, and may continue into the next
        document.
        """
        pieces: list[Bytes] = []
        free_tokens = self.seq_len
        while free_tokens:
            # A uniform draw of a byte picks documents in proportion to their lengths.
            byte = rng.integers(len(self._text))
            document = int(np.searchsorted(self._document_starts, byte, side="right")) - 1
            start, end = self._document_starts[document : document + 2]
            length = min(self._draw_length(rng), int(end - start))
            if len(pieces) == self.max_documents - 1:
                length = free_tokens
            length = min(length, free_tokens)
            offset = rng.integers(max(0, end - start - length) + 1)
            pieces.append(self._stretch(int(start + offset), length))
            free_tokens -= length
        return pieces

    def _draw_length(self, rng: np.random.Generator) -> int:
        median = max(MIN_PIECE_TOKENS, self.seq_len * MEDIAN_PIECE_FRACTION)
        length = rng.lognormal(np.log(median), PIECE_LENGTH_SIGMA)
        return int(np.clip(length, MIN_PIECE_TOKENS, max(MIN_PIECE_TOKENS, self.seq_len)))

    def _batch(self, pieces: list[Bytes]) -> Batch:
        lengths = [len(piece) for piece in pieces]
        tokens = np.concatenate(pieces).astype(np.int64)
        bounds = np.full(self.max_documents + 1, self.seq_len, dtype=np.int32)
        bounds[: len(pieces) + 1] = np.cumsum([0, *lengths])
        targets = np.full(self.seq_len, IGNORE_INDEX, dtype=np.int64)
        targets[:-1] = tokens[1:]
        targets[bounds[1:] - 1] = IGNORE_INDEX
        position_ids = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
        return Batch(
            tokens=torch.from_numpy(tokens)[None],
            targets=torch.from_numpy(targets)[None],
            position_ids=torch.from_numpy(position_ids)[None],
            cu_seqlens=torch.from_numpy(bounds),
        )
