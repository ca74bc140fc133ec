"""A tape that is run where another is recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from customized_ops.ring_attention.core import tape
from customized_ops.ring_attention.core.tape.making import view_of


def test_its_steps_become_steps_of_the_other() -> None:
    """Also those on a tensor that is the same in all calls of the other."""

    def inner(q: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        part = tape.copied(Tensor.clone, q[1:])
        out = tape.allocate(torch.zeros_like, part)
        tape.launch(Tensor.add_, out[0], table[:2])
        tape.launch(Tensor.add_, out, part)
        return out, out[:1], q

    def drawn(seed: int) -> Tensor:
        return torch.randn(4, 2, generator=torch.Generator().manual_seed(seed))

    tables = [torch.arange(3.0), torch.arange(3.0) + 5]
    _, first = tape.record(lambda: inner(drawn(0), tables[0]), (q := drawn(0), tables[0]))
    assert first is None, "it was given other tensors than it found"
    _, first = tape.record(lambda: inner(q, tables[0]), (q, tables[0]))
    assert first is not None

    def outer(x: Tensor) -> tuple[Tensor, ...]:
        double = tape.computed(torch.mul, x, 2)
        out, row, same = tape.run_tape(first, (double, tables[1]))
        assert same is double
        tape.launch(Tensor.add_, row, same[0])
        return out, tape.computed(torch.sum, out, 0)

    def by_hand(x: Tensor) -> tuple[Tensor, ...]:
        want = 2 * x[1:]
        want[0] += tables[1][:2] + 2 * x[0]
        return want, want.sum(0)

    results, made = tape.record(lambda: outer(q), (q,))
    assert made is not None
    for x, got in [(q, results), (drawn(3), made.run((drawn(3),))), (drawn(4), outer(drawn(4)))]:
        for mine, his in zip(got, by_hand(x), strict=True):
            torch.testing.assert_close(mine, his)
    assert len(made.steps) == len(first.steps) + 4 - 1, "a view of a table is not made anew"
    kept = set(made.results)
    freed = {number for step in made.steps for number in step.frees}
    roots = {step.makes for step in made.steps if step.makes and step.function is not view_of}
    assert len(roots) == 4 and roots == freed & roots | kept


def test_memory_of_the_other_in_another_dtype_is_refused() -> None:
    bits = torch.arange(3, dtype=torch.int32)
    _, inner = tape.record(lambda: (tape.copied(Tensor.clone, bits),), (bits,))
    assert inner is not None
    x = torch.ones(3)
    for given, fits in ((bits, True), (x.view(torch.int32), False)):

        def outer(given: Tensor = given) -> tuple[Tensor, ...]:
            return *tape.run_tape(inner, (given,)), tape.computed(torch.neg, x)

        results, made = tape.record(outer, (x,))
        assert torch.equal(results[0], given) and (made is not None) == fits
