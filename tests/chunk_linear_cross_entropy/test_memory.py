"""The logits are never made: the largest tensor grows with tokens or with rows, not with both."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmark.parts import loss_memory
from loss_cases import LossCase, results
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from customized_ops.chunk_linear_cross_entropy import chunks
from customized_ops.chunk_linear_cross_entropy.op import _backward, token_losses


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any op made, views left out, and
    how many matrices were multiplied."""

    elements = 0
    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self.elements = max(self.elements, leaf.numel())
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
        return made


def largest(case: LossCase) -> int:
    """Elements of the largest tensor in forward and backward."""
    return seen(case).elements


def seen(case: LossCase, wanted: tuple[bool, bool, bool] | None = None) -> Largest:
    """Of forward and backward: the functions below the op, into which a mode does not see."""
    hidden, weight, target, bias = case.tensors()
    given = (hidden, weight, target, bias, case.ignore_index, case.softcap, case.chunk_size or 0)
    given = (*given, case.vocab, "", True)
    douts = [torch.ones(case.tokens, dtype=torch.float64)] * 2
    with Largest() as seen:
        outs = token_losses.__wrapped__(*given)  # type: ignore[attr-defined]
        _backward(*douts, *given, wanted, *outs)
    return seen


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_nothing_larger_than_a_chunk_or_an_input(softcap: float) -> None:
    options: dict[str, Any] = {"width": 8, "bias": True, "softcap": softcap, "chunk_size": 16}
    for tokens in (64, 640):
        for vocab in (100, 1000):
            case = LossCase((2, tokens), vocab, **options)
            assert largest(case) == max(16 * vocab, vocab * 8, 2 * tokens * 8)


def test_frozen_parts_cost_nothing() -> None:
    """Neither a [v, d] nor an [l, d] buffer, nor their product."""
    steps, tokens = 16, 32
    case = LossCase((tokens,), 100, 64, bias=True, chunk_size=tokens // steps)
    everything = seen(case)
    assert (everything.elements, everything.products) == (100 * 64, 4 * steps)
    frozen_weight = seen(case, (True, False, True))
    assert (frozen_weight.elements, frozen_weight.products) == (tokens * 64, 3 * steps)
    only_bias = seen(case, (False, False, True))
    assert (only_bias.elements, only_bias.products) == (2 * 100, 2 * steps)


def test_the_measure_sees_logits() -> None:
    case = LossCase((2, 64), 100, reduction="sum")
    with Largest() as seen:
        results(case, case.dense, case.tensors(), case.upstream())
    assert seen.elements == 2 * 64 * 100
    assert largest(case) < seen.elements == largest(replace(case, chunk_size=1000))


def test_the_default_chunk_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 8 * 100 * 16)
    for tokens in (64, 640):
        assert largest(LossCase((tokens,), 100, 4, chunk_size=None)) == max(1600, 4 * tokens)


def test_the_benchmark_runs() -> None:
    said = io.StringIO()
    with redirect_stdout(said):
        device = ["--device", "cpu", "--runs", "1"]
        loss_memory.main([*device, "--sizes", "32x50x8", "--chunk-sizes", "8"])
    lines = said.getvalue().splitlines()
    assert [line.split()[3] for line in lines[2:] if line[6].isdigit()] == [
        "plain",
        "chunked",
        "chunk",
    ]


def test_the_computed_figure() -> None:
    """96 GiB at 65536 x 131072; where the width is larger than the tokens, the gradients."""
    assert loss_memory.computed_bytes(65536, 131072, 4096, 2) == 96 * 2**30
    assert loss_memory.computed_bytes(1, 1024, 4096, 2) > 1024 * 4096 * 2
