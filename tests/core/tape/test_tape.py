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
from customized_ops.ring_attention.core.tape import composer, making
from customized_ops.ring_attention.core.tape.composer import Composer
from customized_ops.ring_attention.core.tape.recorder import Elements

BIAS = torch.randn(2, 3, dtype=torch.float64)


def mixed(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Views, results of several kinds, and a tensor that is the same in all calls."""
    part = q[:, 1:3].detach()
    summed = tape.allocate(torch.zeros_like, part)
    tape.launch(Tensor.add_, summed, part)
    tape.launch(Tensor.add_, summed, k.narrow(1, 0, 2))
    wide = tape.allocate(torch.full, (2, 3), fill_value=0.5, dtype=torch.float64)
    tape.launch(Tensor.add_, wide, BIAS)
    tape.launch(Tensor.copy_, wide[0], tape.allocate(wide.new_full, (3,), 2.0))
    both = tape.computed(lambda *parts: torch.cat(parts, -1), summed, part)
    assert tape.computed(Tensor.transpose, both, 0, 1).is_set_to(both.transpose(0, 1)), "a view"
    dense = tape.copied(Tensor.contiguous, both.transpose(0, 1))
    assert tape.copied(Tensor.contiguous, dense) is dense
    return dense, summed[1:], wide


@pytest.mark.parametrize("promised", [False, True])
def test_a_tape_is_its_function_of_other_tensors(
    promised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if promised:  # what a torch has that lacks the faster ways
        monkeypatch.setattr(making, "_makers", {})
        monkeypatch.setattr(composer, "view_of", making._view)

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


def test_views_of_inputs_that_share_memory() -> None:
    """As q, k and v that one product made: each view is one of the input that has its elements."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out = tape.allocate(q.new_zeros, (2, 4, 3))
        for t in (q, k, v):
            for head in range(t.shape[1]):
                tape.launch(Tensor.add_, out[0], t[1:, head])
        tape.launch(Tensor.copy_, out[1, :, :2], k[1:, 0, 1:])
        tape.launch(Tensor.copy_, out[:, 4:], q[5:5, 0])  # nothing
        return (out,)

    fused = torch.randn(5, 4, 3)
    given = fused.split([2, 1, 1], 1)
    _, made = tape.record(lambda: function(*given), given)
    assert made is not None
    others = [torch.randn(5, heads, 3).transpose(0, 1).contiguous() for heads in (2, 1, 1)]
    apart = [t.transpose(0, 1) for t in others]
    strided = [
        torch.empty_strided(t.shape, t.stride()).copy_(a) for t, a in zip(given, apart, strict=True)
    ]
    assert torch.equal(made.run(strided)[0], function(*strided)[0])
    bits = fused.view(torch.int32)  # of the same memory, which a launch is given with the rest
    both_kinds = lambda: (tape.computed(torch.add, bits[1:, :2], fused[1:, :2]),)  # noqa: E731
    _, made = tape.record(both_kinds, (fused[:, :2], bits[:, :2]))
    assert made is not None and len(made.steps) == 3, "each is a view of its own"
    whole = fused.view(5, 12)  # which has elements of several inputs
    crossing = lambda: (tape.computed(torch.neg, whole[:, 2:8]),)  # noqa: E731
    assert tape.record(crossing, given)[1] is None
    for both in ((fused[:, :2], fused[:, :2]), (whole, whole)):
        either = lambda both=both: (tape.computed(torch.neg, both[1][1:]),)  # noqa: E731
        _, made = tape.record(either, both)
        assert made is not None and torch.equal(made.run(both)[0], -both[0][1:])


def test_which_elements_a_tensor_has() -> None:
    fused = torch.arange(60.0).view(5, 4, 3)
    for t in (
        fused[:, 1:3],
        fused[1:4, :, 1],
        fused.transpose(0, 2)[::2],
        fused[2:3].expand(2, 4, 3),
    ):
        root, has = Elements.of(t), set(t.flatten().tolist())
        for place in range(-3, 63):
            assert root.has(place) == (float(place) in has)


def test_memory_is_freed_as_without_recording() -> None:
    seen: list[tuple[bool, bool]] = []

    def function(q: Tensor) -> tuple[Tensor, ...]:
        made = tape.copied(Tensor.clone, q)
        view = made[1:]
        memory = StorageWeakRef(made.untyped_storage())
        del made
        alive = not memory.expired()
        total = tape.computed(torch.sum, view, 0)
        del view
        seen.append((alive, memory.expired()))
        return (total,)

    q = torch.randn(4, 3)
    _, made = tape.record(lambda: function(q), (q,))
    assert seen == [(True, True)] and made is not None
    freed = [number for step in made.steps for number in step.frees]
    assert len(freed) == len(set(freed)) == 2, "the tensor that was made, and its view"
    assert torch.equal(made.run((q,))[0], function(q)[0])


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
        double = tape.copied(Tensor.clone, t)
        tape.launch(told_of, double, 3)
        with tape.aside():
            tape.launch(told_of, double, 9)
        return (double,)

    _, made = tape.record(lambda: launching(q), (q,))
    assert made is not None and not tape.recording()
    made.run((torch.full((2,), 5.0),))
    assert told == [4.0, 10.0, 8.0]
    more = lambda: tape.computed(torch.add, q, 1)  # noqa: E731
    size = torch.tensor(2)
    refused = [
        lambda: (q + 1,),  # made where it is not seen
        lambda: (tape.computed(Tensor.view, q, torch.int32).clone(),),
        lambda: (tape.computed(torch.neg, q.view(torch.int32)),),
        lambda: tape.refuse() or (more(),),
        lambda: (tape.computed(torch.add, q, tape.launch(torch.neg, q)),),  # that a launch makes
        lambda: tape.launch(len, {"in a dict": q}) and (more(),),
        lambda: tape.launch(str, Held([more()])) and (more(),),
        lambda: (tape.allocate(torch.rand, 2),),  # another one each time
        lambda: (tape.allocate(torch.zeros, size),),
        lambda: (tape.allocate(q.new_zeros, (1, size)),),
        lambda: (tape.allocate(torch.empty, 2, device="meta"),),
        lambda: (tape.copied(Tensor.to, q, "meta"),),
    ]
    for function in refused:
        results, made = tape.record(function, (q,))
        assert made is None and len(results) == 1


def test_a_launch_is_one_step_whatever_it_launches() -> None:
    """Also after an error in it."""

    def inner(out: Tensor, fails: bool) -> None:
        tape.launch(Tensor.add_, out, 1)
        if fails:
            raise ValueError("planned")

    def outer(out: Tensor, fails: bool) -> None:
        tape.launch(inner, out, fails)
        out.mul_(2)

    def function(x: Tensor, fails: bool) -> tuple[Tensor]:
        out = tape.copied(Tensor.clone, x)
        try:
            tape.launch(outer, out, fails)
        except ValueError:
            return (tape.computed(torch.add, x, 5),)
        return (out,)

    x, other = torch.ones(2), torch.full((2,), 7.0)
    _, made = tape.record(lambda: function(x, False), (x,))
    assert made is not None and torch.equal(made.run((other,))[0], torch.full((2,), 16.0))
    results, made = tape.record(lambda: function(x, True), (x,))
    assert torch.equal(results[0], x + 5) and made is not None
    assert made.steps[-1].function is torch.add, "after the error all is seen"


def test_memory_of_two_streams_is_freed_once_they_have_met() -> None:
    """Made on the second stream, and read on the first when the second has no steps left; but not
    what the first stream made and the second read."""

    def make(*_: Any) -> Tensor:
        return torch.ones(1)

    def use(*_: Any) -> None:
        pass

    first, second = 0, 7
    steps = Composer(1)
    one, two = (steps.made(make, (), (), stream) for stream in (first, second))
    for stream in (second, first):
        steps.add(use, (None, None), ((0, one), (1, two)), stream)
    last = steps.made(make, (), (), first)
    assert [step.frees for step in steps.tape([last]).steps] == [(), (), (), (two,), ()]


def test_a_list_that_changes_later_is_kept_as_it_was() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        dims = [0]
        first = tape.computed(torch.sum, x, dims)
        dims[0] = 1
        return first, tape.computed(torch.sum, x, dims)

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
        wide = tape.allocate(torch.zeros, 2, 5)
        tape.launch(Tensor.copy_, wide[0, :3], t[1])
        made = tape.copied(Tensor.clone, t), tape.copied(Tensor.to, t, torch.float64)
        made += tape.allocate(t.new_full, (2,), 7.0), tape.allocate(torch.full, (3,), 2.0)
        zeros, none = tape.allocate(torch.zeros_like, t), tape.allocate(t.new_empty, 0)
        return *made, zeros, wide[0, 1:], none

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
