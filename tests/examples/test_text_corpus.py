"""The text of the examples: batches hold real text, and no loss or position crosses a document."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from shared import text_corpus
from shared.text_corpus import IGNORE_INDEX, MIN_PIECE_TOKENS, Batch, PackedText, load_documents

FIELDS = [field.name for field in dataclasses.fields(Batch)]
SEQ_LENS = [1, 15, 16, 17, 200, 1024, 5000]


@pytest.fixture(scope="module")
def documents():
    return load_documents(max_bytes=300_000)


@pytest.fixture(scope="module")
def corpus_bytes(documents):
    return b"".join(document.tobytes() for document in documents)


def spans(batch: Batch) -> list[tuple[int, int]]:
    """(start, end) of each document that is not padding."""
    bounds = batch.cu_seqlens.tolist()
    return [(start, end) for start, end in itertools.pairwise(bounds) if start < end]


def assert_documents_consistent(batch: Batch) -> None:
    """Targets are the tokens shifted within each document; positions restart at each document."""
    tokens, targets, position_ids = batch.tokens[0], batch.targets[0], batch.position_ids[0]
    for start, end in spans(batch):
        assert targets[start : end - 1].tolist() == tokens[start + 1 : end].tolist()
        assert targets[end - 1] == IGNORE_INDEX
        assert position_ids[start:end].tolist() == list(range(end - start))


def assert_same(a: Batch, b: Batch) -> None:
    for name in FIELDS:
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_documents_are_non_empty_bytes_of_the_asked_total():
    documents = load_documents(max_bytes=50_000)
    assert sum(map(len, documents)) == 50_000
    for document in documents:
        assert document.dtype == np.uint8 and document.ndim == 1 and len(document) > 0


def test_default_size_is_reached():
    documents = load_documents()
    assert sum(map(len, documents)) == 4_000_000
    assert len(documents) > 100


def test_documents_are_deterministic_and_shuffled_by_the_seed():
    first, again, other = (load_documents(100_000, seed=seed) for seed in (0, 0, 1))
    assert [d.tobytes() for d in first] == [d.tobytes() for d in again]
    assert [d.tobytes() for d in first] != [d.tobytes() for d in other]


def test_documents_hold_sources_and_help_texts_but_no_tests(tmp_path, monkeypatch):
    (tmp_path / "b.py").write_text("b = 2")
    (tmp_path / "a.py").write_text("a = 1")
    (tmp_path / "notes.txt").write_text("not Python")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "gone.py").symlink_to(tmp_path / "missing")
    for folder in text_corpus.SKIPPED_FOLDERS | {"package"}:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "inside.py").write_text(f"inside = {folder!r}")
    monkeypatch.setattr(text_corpus.sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    monkeypatch.setattr(text_corpus, "DOCUMENTATION_TOPICS", {"if": "The if statement"})

    texts = sorted(document.tobytes() for document in load_documents())
    assert texts == [b"The if statement", b"a = 1", b"b = 2", b"inside = 'package'"]


def test_no_source_path_leaves_the_standard_library_or_enters_its_tests():
    paths = list(text_corpus._source_paths(Path(text_corpus.sysconfig.get_path("stdlib"))))
    assert "argparse.py" in {path.name for path in paths}
    assert not [path for path in paths if {"test", "site-packages"} & set(path.parts)]


def test_max_bytes_must_be_positive():
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        load_documents(max_bytes=0)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("seq_len", SEQ_LENS)
def test_shapes_and_dtypes_are_constant(documents, seq_len, packed):
    text = PackedText(documents, seq_len, seed=0)
    for step in range(10):
        batch = text.batch(step, packed=packed)
        for name in ("tokens", "targets", "position_ids"):
            tensor = getattr(batch, name)
            assert tensor.shape == (1, seq_len) and tensor.dtype == torch.int64, name
        assert batch.cu_seqlens.shape == (text.max_documents + 1,)
        assert batch.cu_seqlens.dtype == torch.int32
        assert batch.tokens.min() >= 0 and batch.tokens.max() < text_corpus.VOCAB_SIZE


@pytest.mark.parametrize("seq_len", SEQ_LENS)
def test_packed_documents_fill_the_row(documents, corpus_bytes, seq_len):
    text = PackedText(documents, seq_len, seed=0)
    for step in range(20):
        batch = text.batch(step)
        bounds = batch.cu_seqlens
        assert bounds[0] == 0 and bounds[-1] == seq_len
        assert (bounds.diff() >= 0).all()
        assert (bounds[len(spans(batch)) :] == seq_len).all(), "padding comes last"
        assert_documents_consistent(batch)
        lengths = [end - start for start, end in spans(batch)]
        assert all(MIN_PIECE_TOKENS <= length <= seq_len for length in lengths[:-1])
        for start, end in spans(batch):
            assert bytes(batch.tokens[0, start:end].tolist()) in corpus_bytes


def test_lengths_are_long_tailed(documents):
    text = PackedText(documents, 4096, seed=0)
    lengths = [end - start for step in range(50) for start, end in spans(text.batch(step))]
    assert np.mean(lengths) > 1.2 * np.median(lengths)
    assert max(lengths) > 5 * np.median(lengths)


@pytest.mark.parametrize("packed", [True, False])
def test_batch_depends_on_seed_and_step_alone(documents, packed):
    text, other_rank = PackedText(documents, 512, seed=3), PackedText(documents, 512, seed=3)
    later = text.batch(7, packed=packed)
    text.batch(0, packed=packed)
    assert_same(text.batch(7, packed=packed), later)
    assert_same(other_rank.batch(7, packed=packed), later)
    for different in (text.batch(8, packed), PackedText(documents, 512, seed=4).batch(7, packed)):
        assert not torch.equal(different.tokens, later.tokens)


@pytest.mark.parametrize("seq_len", SEQ_LENS)
def test_unpacked_is_one_document_with_true_next_bytes(documents, seq_len):
    text = PackedText(documents, seq_len, seed=0)
    kept = b"".join(d.tobytes() for d in documents if len(d) >= MIN_PIECE_TOKENS)
    around = kept + kept[: seq_len + 1]  # the text wraps around at its end
    for step in range(5):
        batch = text.batch(step, packed=False)
        assert batch.position_ids[0].tolist() == list(range(seq_len))
        assert batch.cu_seqlens.tolist() == [0] + [seq_len] * text.max_documents
        assert batch.targets[0, :-1].tolist() == batch.tokens[0, 1:].tolist()
        stretch = bytes([*batch.tokens[0].tolist(), int(batch.targets[0, -1])])
        assert stretch in around


def test_last_piece_takes_the_rest_when_documents_are_short():
    short = [np.full(MIN_PIECE_TOKENS, letter, dtype=np.uint8) for letter in b"abc"]
    text = PackedText(short, 4096, seed=0)
    assert text.max_documents == text_corpus.MAX_DOCUMENTS
    batch = text.batch(0)
    lengths = [end - start for start, end in spans(batch)]
    rest = 4096 - (text.max_documents - 1) * MIN_PIECE_TOKENS
    assert lengths == [MIN_PIECE_TOKENS] * (text.max_documents - 1) + [rest]
    assert_documents_consistent(batch)


def test_short_documents_are_left_out():
    tiny, whole = np.zeros(MIN_PIECE_TOKENS - 1, np.uint8), np.ones(MIN_PIECE_TOKENS, np.uint8)
    text = PackedText([tiny, whole, tiny], 256, seed=0)
    for packed in (True, False):
        assert (text.batch(0, packed=packed).tokens == 1).all()
    with pytest.raises(ValueError, match="none of the 2 documents has the 16 bytes needed"):
        PackedText([tiny, tiny], 256, seed=0)


def test_seq_len_must_be_positive(documents):
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        PackedText(documents, 0, seed=0)


def test_batch_is_frozen(documents):
    batch = PackedText(documents, 64, seed=0).batch(0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.tokens = batch.targets


@pytest.mark.parametrize("name", ["targets", "position_ids"])
def test_consistency_check_can_fail(documents, name):
    batch = PackedText(documents, 256, seed=0).batch(0)
    getattr(batch, name)[0, 3] += 1
    with pytest.raises(AssertionError):
        assert_documents_consistent(batch)
