"""What nnscaler times is what the busiest rank will do: all keys of its rows, and nothing sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from annotations.engines.nnscaler import OpNode
from annotations.engines.nnscaler.timing import example_inputs, timed
from customized_ops.ring_attention.core.comm.comm_groups import FakeComm
from customized_ops.ring_attention.core.kernels import KERNELS, ForwardOperands, Kernel
from customized_ops.ring_attention.core.mask.slices import areas
from on_nnscaler.models import attention_models as models
from on_nnscaler.models.attention_models import training
from on_nnscaler.support import jobs, policies
from on_nnscaler.support.cpu import on_cpu

pytestmark = pytest.mark.nnscaler


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pairs that kernels attend, one number a call: times heads and batch entries."""
    counted: list[int] = []

    def watch(kernel: Kernel) -> None:
        forward = kernel.forward

        def count(given: ForwardOperands, attended: Any, *rest: Any) -> Any:
            b, _, h, _ = given.q.shape
            counted.append(int(areas(attended.slices).sum()) * b * h)
            return forward(given, attended, *rest)

        monkeypatch.setattr(kernel, "forward", count)

    for kernel in KERNELS.values():
        watch(kernel)
    return counted


def whole_and_part(tmp_path: Path, attend: Any, cut: str, parts: int) -> tuple[OpNode, OpNode]:
    """Of the model's first attention."""
    found: list[OpNode] = []

    def policy(graph: Any, config: Any) -> Any:
        node = graph.select(ntype=OpNode)[0]
        index, dim = policies.place_of(node, cut)
        found.extend([node, node.algorithm("dim").instantiate(idx=index, dim=dim, num=parts)[0]])
        return policies.attention(graph, config, [("", parts)])

    jobs.generate(training(attend, policy, plan=parts), tmp_path, ranks=parts)
    return found[0], found[1]


def run(node: OpNode, group: FakeComm | None = None) -> tuple[Any, ...]:
    """As it is timed, forward and backward; as another rank's if given."""
    with on_cpu():
        inputs = list(example_inputs(node))
    if group is not None:
        inputs[node.names.index("process_group")] = group
    results = timed(*inputs, **node.kwargs)
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results, [torch.zeros_like(result) for result in results])
    return results


def attended(pairs: list[int], node: OpNode, group: FakeComm | None = None) -> int:
    pairs.clear()
    run(node, group)
    return sum(pairs)


ON_SEQUENCE = (
    *(models.ring, models.ring_with_everything, models.zigzag, models.window, models.streaming),
    *(models.varlen, models.packed_window, models.packed_streaming, models.masked),
)


@pytest.mark.parametrize("attend", ON_SEQUENCE)
@pytest.mark.parametrize("parts", [2, 4])
def test_a_part_of_the_sequence(tmp_path: Path, pairs: list[int], attend: Any, parts: int) -> None:
    whole, part = whole_and_part(tmp_path, attend, "l", parts)
    every = [attended(pairs, part, FakeComm(n, parts)) for n in range(parts)]
    assert sum(every) == attended(pairs, whole) > 0
    assert attended(pairs, part) == max(every)


@pytest.mark.parametrize("attend", [models.ring_by_rows, models.varlen_by_rows])
def test_a_part_of_the_rows(tmp_path: Path, pairs: list[int], attend: Any) -> None:
    """Of causal attention the last part has most to do: 3/4 of all, but for the diagonal."""
    whole, part = whole_and_part(tmp_path, attend, "lq", 2)
    share = attended(pairs, part) / attended(pairs, whole)
    assert 0.7 < share < 0.76


@pytest.mark.parametrize("attend", [models.ring, models.varlen])
@pytest.mark.parametrize(("cut", "parts"), [("g", 2), ("qh", 4)])
def test_a_part_of_the_heads(
    tmp_path: Path, pairs: list[int], attend: Any, cut: str, parts: int
) -> None:
    whole, part = whole_and_part(tmp_path, attend, cut, parts)
    assert attended(pairs, part) * parts == attended(pairs, whole)


@pytest.mark.parametrize("attend", [models.ring, models.ring_by_rows])
def test_cuts_that_an_op_is_told_are_filed_apart(tmp_path: Path, attend: Any) -> None:
    cut = "lq" if attend is models.ring_by_rows else "l"
    whole, part = whole_and_part(tmp_path, attend, cut, 2)
    assert part.signature == f"{whole.signature}.{cut}_in_2"


@pytest.mark.parametrize("attend", [models.shuffled, models.shuffled_documents])
def test_moves_of_tokens(tmp_path: Path, attend: Any) -> None:
    _, part = whole_and_part(tmp_path, attend, "l", 2)
    (result,) = run(part)
    assert result.shape == tuple(part.output(0).shape)
