"""What a function gives a device, recorded and given again."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from customized_ops.ring_attention.core import tape
from customized_ops.ring_attention.core.tape import composer, op_calls
from customized_ops.ring_attention.core.tape.composer import Composer, Note, Part

ONE = torch.tensor(1)
BIAS = torch.randn(2, 3, dtype=torch.float64)


def mixed(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Views, results of several kinds, and a tensor that is the same in all calls."""
    part = q[:, 1:3].detach()
    summed = torch.zeros_like(part)
    summed.add_(part, alpha=2).add_(k.narrow(1, 0, 2))
    wide = torch.full((2, 3), 0.5, dtype=torch.float64)
    wide.add_(BIAS)
    wide[0] = torch.full((3,), fill_value=2.0, dtype=torch.float64)
    both = torch.cat([summed, part], dim=-1, out=part.new_empty(3, 2, 4))
    return both.transpose(0, 1).contiguous(), summed[1:], wide


@pytest.mark.parametrize("promised", [False, True])
def test_a_tape_is_its_function_of_other_tensors(
    promised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if promised:  # what a torch has that lacks the faster ways
        monkeypatch.setattr(op_calls, "_compiled", None)
        monkeypatch.setattr(composer, "view_of", op_calls._view)

    def drawn(seed: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(seed)
        return torch.randn(3, 5, 2, generator=source), torch.randn(3, 4, 2, generator=source)

    first = drawn(0)
    results, made = tape.record(lambda: mixed(*first), first)
    assert made is not None
    for seed in range(3):
        given = drawn(seed)
        for mine, his in zip(made.run(given), mixed(*given), strict=True):
            assert torch.equal(mine, his) and mine.stride() == his.stride()
    offset = torch.randn(4, 5, 2)[1:]  # memory that starts elsewhere
    for mine, his in zip(made.run((offset, first[1])), mixed(offset, first[1]), strict=True):
        assert torch.equal(mine, his)
    assert all(torch.equal(a, b) for a, b in zip(results, mixed(*first), strict=True))
    assert made.source.startswith("def run(t0, t1):\n    ")


def test_memory_is_freed_as_without_recording() -> None:
    seen: list[tuple[bool, bool]] = []

    def function(q: Tensor) -> tuple[Tensor, ...]:
        made = torch.empty_like(q).copy_(q)
        view = made[1:]
        memory = StorageWeakRef(made.untyped_storage())
        del made
        alive = not memory.expired()
        total = view.sum(dim=0)
        del view
        seen.append((alive, memory.expired()))
        return (total,)

    q = torch.randn(4, 3)
    _, made = tape.record(lambda: function(q), (q,))
    assert seen == [(True, True)] and made is not None
    freed = [number for step in made.steps for number in step.frees]
    assert len(freed) == len(set(freed)) == 2, "the tensor that was made, and its view"
    assert torch.equal(made.run((q,))[0], function(q)[0])


@torch.library.custom_op("seqshard_tests::new_and_given", mutates_args=("t",))
def new_and_given(t: Tensor) -> Tensor:
    """Writes to a tensor, and returns a new one."""
    return t.mul_(1) + 1


@dataclass
class Held:
    """Tensors that a launch is given in an object."""

    tensors: list[Tensor]


def test_launches_are_seen_and_others_refused() -> None:
    told: list[float] = []
    q = torch.ones(2)

    def told_of(t: Tensor, number: int) -> None:
        told.append(float(t[0]) + number)

    def launching(t: Tensor) -> tuple[Tensor, ...]:
        double = torch.empty_like(t).copy_(t)
        tape.launch(told_of, double, 3)
        return (double,)

    _, made = tape.record(lambda: launching(q), (q,))
    assert made is not None and not tape.recording()
    made.run((torch.full((2,), 5.0),))
    assert told == [4.0, 8.0]
    refused = [
        lambda: (q * q.sum().item(),),  # a value is read
        lambda: (torch.rand(2),),  # another one each time
        lambda: (torch.from_numpy((q + 1).numpy()),),  # made where torch does not see it
        lambda: (q.view(torch.int32),),
        lambda: tape.refuse() or (q + 1,),
        lambda: (q + tape.launch(torch.neg, q),),  # a tensor that a launch makes
        lambda: (tape.launch(told_of, q + 1, 3) or q + new_and_given(q),),  # and an op that writes
        lambda: tape.launch(len, {"in a dict": q}) and (q + 1,),
        lambda: tape.launch(str, Held([(q + 1)])) and (q + 1,),
        lambda: (q + q.to("meta").numel(),),
        lambda: (torch.ops.aten.add(q, q),),  # any registered op
        lambda: (torch.where(q > 0)[0] + q,),  # of a shape that depends on values
        lambda: (q[q > 0],),
        lambda: (q.sort().values,),
        lambda: (q[ONE] + q,),  # by the value of another tensor, as below
        lambda: (q[ONE:] + q,),
        lambda: (q.narrow(0, ONE, 1) + q,),
        lambda: (torch.zeros(ONE) + q,),
        lambda: (q.new_zeros(2, ONE)[:, 0] + q,),
        lambda: (q.unsqueeze(0).sum(ONE - 1) + q,),
        lambda: (q.clone().__setitem__(slice(ONE, None), 2.0) or q + 1,),
        lambda: (torch.clone(input=q),),  # by keywords alone
        lambda: (torch.cat([q, q], out=torch.empty(0))[:2] + q,),  # resized
    ]
    for function in refused:
        results, made = tape.record(function, (q,))
        assert made is None and len(results) == 1
    assert tape.record(lambda: (q + q,), (q, q))[1] is None, "one tensor that is given twice"


def test_a_launch_is_one_step_whatever_it_launches() -> None:
    """Also after an error in it, which ends what is not seen."""

    def inner(out: Tensor, fails: bool) -> None:
        out.add_(1)
        if fails:
            raise ValueError("planned")

    def outer(out: Tensor, fails: bool) -> None:
        tape.launch(inner, out, fails)
        out.mul_(2)

    def function(x: Tensor, fails: bool) -> tuple[Tensor]:
        out = x.clone()
        try:
            tape.launch(outer, out, fails)
        except ValueError:
            return (x + 5,)
        return (out,)

    x, other = torch.ones(2), torch.full((2,), 7.0)
    _, made = tape.record(lambda: function(x, False), (x,))
    assert made is not None and torch.equal(made.run((other,))[0], torch.full((2,), 16.0))
    results, made = tape.record(lambda: function(x, True), (x,))
    assert torch.equal(results[0], x + 5) and made is not None
    assert any("add" in str(step.function) for step in made.steps), "after the error all is seen"


def test_memory_of_two_streams_is_freed_once_they_have_met() -> None:
    """Made on the second stream, and read on the first when the second has no steps left; but not
    what the first stream made and the second read."""

    def make(*_: Any) -> Tensor:
        return torch.ones(1)

    def use(*_: Any) -> None:
        pass

    first, second = 0, 7
    notes = [
        Note(make, {}, (), 1, first),
        Note(make, {}, (), 2, second),
        Note(use, {0: Part(1), 1: Part(2)}, (None, None), None, second),
        Note(use, {0: Part(1), 1: Part(2)}, (None, None), None, first),
        Note(make, {}, (), 3, first),
    ]
    made = Composer(1, 4).tape(notes, [Part(3)])
    assert [step.frees for step in made.steps] == [(), (), (), (2,), ()]


def test_a_list_that_changes_later_is_kept_as_it_was() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        dims = [0]
        first = x.sum(dims)
        dims[0] = 1
        return first, x.sum(dims)

    x, other = torch.randn(3, 4), torch.randn(3, 4)
    _, made = tape.record(lambda: function(x), (x,))
    assert made is not None
    for mine, his in zip(made.run((other,)), function(other), strict=True):
        assert torch.equal(mine, his)


@pytest.mark.parametrize("in_backward", [False, True])
def test_results_are_made_apart(in_backward: bool) -> None:
    """Where memory is all that an op makes beside a copy or one number, one tape makes it, and the
    other writes it."""
    q = torch.randn(4, 3)

    def function(t: Tensor) -> tuple[Tensor, ...]:
        wide = torch.zeros(2, 5)
        wide[0, :3].copy_(t[1])
        made = t.clone(), t.to(torch.float64), t.new_full((2,), 7.0), torch.full((3,), 2.0)
        return *made, torch.zeros_like(t), wide[0, 1:], t.new_empty(0)

    with torch._C._AutoDispatchBelowAutograd() if in_backward else nullcontext():
        _, made = tape.record(lambda: function(q), (q,))
    assert made is not None
    halves = made.apart()
    assert halves is not None
    make, fill = halves
    other = torch.randn(4, 3)
    tensors = make.run(())
    assert fill.run((other, *tensors)) == ()
    want = function(other)
    for mine, his in zip(tensors, want, strict=False):
        assert torch.equal(mine, his) and mine.stride() == his.stride() and mine.dtype == his.dtype
    assert len(make.results) == len(want) + 1, "and what the view is of"
