"""Tapes run step by step, and compiled once their form came often."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from customized_ops.ring_attention.core import tape

from .conftest import TAPES


def test_a_tape_keeps_no_longer_what_its_steps_free() -> None:
    """Memory of a tensor is there for the next one, at the latest when a step after it is given
    its arguments."""
    there: list[bool] = []
    memories: list[StorageWeakRef] = []

    def look(t: Tensor) -> None:
        there.append(any(not each.expired() for each in memories))
        memories.append(StorageWeakRef(t.untyped_storage()))

    def function(q: Tensor) -> tuple[Tensor, ...]:
        for _ in range(3):
            made = tape.copied(Tensor.clone, q)
            tape.launch(look, made[1:])
            del made
        return (tape.computed(torch.neg, q),)

    q = torch.randn(4, 3)
    _, made = tape.record(lambda: function(q), (q,))
    assert made is not None and there == [False] * 3
    there.clear()
    made.run((q,))
    assert there == [False] * 3


def test_a_form_is_compiled_when_its_tapes_ran_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tape of another batch has the same form; the two are given their own numbers."""
    monkeypatch.setattr(TAPES, "OFTEN", 5)
    q = torch.ones(3)
    made = [tape.record(lambda n=n: (tape.computed(torch.mul, q, n),), (q,))[1] for n in (2, 3, 4)]
    compiled: list[bool] = []
    for n in (0, 1, 0, 1, 0, 1, 2):
        each = made[n]
        assert each is not None and each.run((q,))[0].tolist() == [n + 2.0] * 3
        compiled.append("maker" in vars(each._code))
    assert compiled == [False] * 5 + [True] * 2
