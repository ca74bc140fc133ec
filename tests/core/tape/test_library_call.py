"""Calls of a library, whose code is not ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from customized_ops.ring_attention.core import tape

Body = Callable[[Tensor, Tensor], Tensor]
BIAS = torch.tensor([1.0, 2.0, 3.0])


def write_sum(out: Tensor, *parts: Tensor) -> None:
    """Stands for a kernel, which does not tell torch what it writes."""
    out.numpy()[...] = torch.stack([part.expand_as(out) for part in parts]).sum(0).numpy()


def recorded(body: Body) -> tape.Tape | None:
    """The tape of a call of a library, ``body(x, bias)``."""
    x = torch.arange(12.0).view(4, 3)

    def function() -> tuple[Tensor]:
        return (tape.copied(Tensor.clone, tape.call_library(body, x=x, bias=BIAS)),)

    results, made = tape.record(function, (x,))
    assert torch.equal(results[0], body(x, BIAS))
    return made


def usual(x: Tensor, bias: Tensor) -> Tensor:
    """Reads properties, makes a tensor, and launches a kernel with views that it made itself."""
    assert x.is_contiguous() and x.shape[1:] == bias.shape
    out = tape.allocate(torch.zeros, x.shape, dtype=x.dtype)
    tape.launch_kernel(write_sum, out.detach(), x.detach(), bias.detach(), out)
    return out


def copying(x: Tensor, bias: Tensor) -> Tensor:
    """Copies what a kernel does not take as it is."""
    rows = tape.copied(Tensor.contiguous, x[:, 1:])
    assert rows.is_contiguous() and tape.copied(Tensor.contiguous, rows) is rows
    out = tape.allocate(torch.empty_like, rows)
    tape.launch_kernel(write_sum, out, rows, bias[:2])
    return out


@pytest.mark.parametrize("body", [usual, copying])
def test_a_tape_is_the_library_of_other_tensors(body: Body) -> None:
    made = recorded(body)
    assert made is not None
    functions = [step.function for step in made.steps]
    assert write_sum in functions and body not in functions
    for seed in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(made.run((x,))[0], body(x, BIAS))


def unseen_copy(x: Tensor, bias: Tensor) -> Tensor:
    out = tape.allocate(torch.empty_like, x)
    tape.launch_kernel(write_sum, out, x + 1)
    return out


def unseen_result(x: Tensor, bias: Tensor) -> Tensor:
    out = torch.empty_like(x)
    tape.launch_kernel(write_sum, tape.allocate(torch.empty_like, x), x)
    return out.copy_(x)


def nothing_launched(x: Tensor, bias: Tensor) -> Tensor:
    return tape.allocate(torch.zeros, 4, 3)


def other_function(x: Tensor, bias: Tensor) -> Tensor:
    out = tape.allocate(torch.neg, x)
    tape.launch_kernel(write_sum, out, x)
    return out


def written_by_torch(x: Tensor, bias: Tensor) -> Tensor:
    out = tape.allocate(torch.zeros, 4, 3)
    tape.launch_kernel(write_sum, out, x)
    return out.mul_(2)


def written_before_a_kernel(x: Tensor, bias: Tensor) -> Tensor:
    out = tape.allocate(torch.ones, 4, 3)
    torch.add(x, 1, out=out)
    tape.launch_kernel(write_sum, out, out.clone(), x)
    return out


def view_that_is_no_copy(x: Tensor, bias: Tensor) -> Tensor:
    rows = tape.copied(lambda t: t[1:], x)
    out = tape.allocate(torch.zeros, 3, 3)
    tape.launch_kernel(write_sum, out, rows)
    return out


def size_by_value(x: Tensor, bias: Tensor) -> Tensor:
    out = tape.allocate(torch.empty, x.sum().long() // 66 * 4, 3)
    tape.launch_kernel(write_sum, out, x)
    return out


@pytest.mark.parametrize(
    "body",
    [
        unseen_copy,
        unseen_result,
        nothing_launched,
        other_function,
        written_by_torch,
        written_before_a_kernel,
        view_that_is_no_copy,
        size_by_value,
    ],
)
def test_what_is_not_seen_is_not_recorded(body: Body) -> None:
    assert recorded(body) is None


def test_a_library_inside_a_launch_is_a_part_of_it() -> None:
    out = torch.zeros(4, 3)
    inside = lambda x: tape.call_library(usual, x=x, bias=BIAS) is None  # noqa: E731
    more = lambda: tape.computed(torch.add, x, 1)  # noqa: E731
    _, made = tape.record(lambda: (tape.launch(inside, x) and out, more())[1:], (x := out + 1,))
    assert made is not None and len(made.steps) == 2


def test_nothing_is_kept_after_an_error() -> None:
    def failing(x: Tensor, bias: Tensor) -> Tensor:
        raise ValueError("planned")

    def function(x: Tensor) -> tuple[Tensor]:
        with pytest.raises(ValueError, match="planned"):
            tape.call_library(failing, x=x, bias=BIAS)
        tape.launch_kernel(lambda _: None, x)  # outside a call of the library
        return (tape.computed(torch.add, x, 1),)

    _, made = tape.record(lambda: function(x), (x := torch.ones(4, 3),))
    assert made is not None and len(made.steps) == 1
