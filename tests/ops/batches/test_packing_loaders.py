"""Loaders and workers that pack batches and plan them ahead, and pinned memory."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from customized_ops.ring_attention import AttnMask, Layout, PackDocuments, packed_batches
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan import plan as plans

from .packed_cases import BATCHES, HEADS


def test_the_next_batch_is_made_while_one_is_used() -> None:
    made = threading.Semaphore(0)

    taken: list[int] = []

    def loader() -> Any:
        for n, batch in enumerate(BATCHES):
            taken.append(n)
            yield batch
            made.release()

    batches = packed_batches(loader(), ranks=2, rank=0, heads=HEADS, ahead=2)
    next(batches)
    for _ in range(2):
        assert made.acquire(timeout=30)
    assert len(taken) >= 3
    before = threading.active_count()
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before - 1
    assert len(taken) < len(BATCHES)


def test_workers_of_a_data_loader_plan_ahead() -> None:
    pack = PackDocuments(ranks=2, rank=1, heads=HEADS)
    loader = DataLoader(BATCHES[:4], batch_size=None, collate_fn=pack, num_workers=1)
    found = list(packed_batches(loader, ranks=2, rank=1, heads=HEADS))
    for batch, given in zip(found, BATCHES, strict=False):
        assert batch.tokens.tolist() == pack(given).tokens.tolist()
        assert make_plan(batch.plan.mask, batch.layout, heads=HEADS, team_size=None) is batch.plan
    assert len(found) == 4


PARTS = ("tokens", "targets", "positions", "cu_seqlens")


def test_a_data_loader_pins_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(id(copy := tensor.clone()))
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = PackDocuments(2, 1, HEADS)(BATCHES[0])
    found = pin_memory(batch, "cuda")  # what a DataLoader does with a batch
    assert [id(getattr(found, name)) for name in PARTS[:3]] == pinned
    assert all(torch.equal(getattr(found, name), getattr(batch, name)) for name in PARTS)
    assert found.layout is batch.layout and found.plan is batch.plan


def test_a_batch_on_a_device_arrives_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is "meta", which has no values to copy; zeros stand for them."""

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor

    monkeypatch.setattr(torch.Tensor, "cpu", on_host)
    batch = PackDocuments(2, 1, HEADS)(BATCHES[0])
    found = pickle.loads(pickle.dumps(batch.to("meta")))
    for name in PARTS:
        assert getattr(found, name).device.type == "cpu"
        assert getattr(found, name).shape == getattr(batch, name).shape
    assert torch.equal(found.cu_seqlens, batch.cu_seqlens)


@pytest.mark.gpu
def test_pinned_batches_of_a_data_loader() -> None:
    pack = PackDocuments(ranks=2, rank=1, heads=HEADS)
    given: dict[str, Any] = {"collate_fn": pack, "num_workers": 1, "pin_memory": True}
    loader = DataLoader(BATCHES[:2], batch_size=None, **given)
    for batch in packed_batches(loader, ranks=2, rank=1, heads=HEADS):
        assert all(getattr(batch, name).is_pinned() for name in PARTS[:3])
        assert torch.equal(pickle.loads(pickle.dumps(batch.to("cuda"))).tokens, batch.tokens)


def test_what_the_loader_raises_is_raised() -> None:
    def loader() -> Any:
        yield BATCHES[0]
        raise OSError("the disk is gone")

    batches = packed_batches(loader(), ranks=2, rank=0, heads=HEADS)
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_a_forked_worker_leaves_its_parents_plans_alone() -> None:
    """Their tables may lie on GPUs, which it may not free, however many plans it makes."""
    mask = AttnMask.causal(24)
    mine = make_plan(mask, Layout.contiguous(24, 2))
    receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)

    def work() -> None:
        kept = len(plans._PLANS), mine in plans._OF_PARENTS[-1]
        again = make_plan(mask, Layout.contiguous(24, 2))
        send.send((*kept, again is mine, np.array_equal(again.work, mine.work)))

    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    assert receive.poll(60) and receive.recv() == (0, True, False, True)
    worker.join()
