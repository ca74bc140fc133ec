"""Running a planned graph: each op on DTensors that lie as its strategy wants them.

Moves between strategies are DTensor redistributions; what an annotated op moves inside is its own
business, through the rule that it was registered with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.fx import Node

from .capture import Captured, with_inputs
from .planner import resolve
from .strategies import Strategy, is_getitem


class PartsOfGradient(torch.autograd.Function):
    """A parameter, whole on every rank, as a DTensor; its gradient stays this rank's part.

    The parts add up to the gradient over the ranks of the plan. Adding them up is left to
    ``sync_grad``, which does it once for all parameters.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, mesh: DeviceMesh) -> Tensor:  # type: ignore[override]
        """The parameter as a replicated DTensor."""
        return DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor | None, None]:  # type: ignore[override]
        """This rank's part of the gradient."""
        assert isinstance(grad, DTensor)
        if grad.placements[0].is_partial():
            return grad.to_local(), None
        # The same on every rank, so that each contributes an equal part.
        whole = grad.redistribute(grad.device_mesh, [Replicate()]).to_local()
        return whole / grad.device_mesh.size(), None


@dataclass(frozen=True, eq=False)
class Program:
    """A captured graph with a strategy for every op.

    Attributes:
        strategies: how each op runs; ``getitem`` nodes follow their producer.
    """

    captured: Captured
    strategies: Mapping[Node, Strategy]
    mesh: DeviceMesh

    def __call__(self, attribute: Callable[[str], Tensor], flat_inputs: list[Any]) -> list[Any]:
        """Run the forward.

        Args:
            attribute: a parameter or buffer by its name in the module.
            flat_inputs: the user's inputs, whole, the same on every rank of the plan.
        Returns:
            The flat results, whole on every rank.
        """
        values = self._inputs(attribute, flat_inputs)
        run = _Run(self, values)
        for node in self.captured.graph.nodes:
            if node.op == "call_function" and not is_getitem(node):
                run.step(node)
            elif node.op == "output":
                return [run.whole(x) for x in node.args[0]]
        raise AssertionError("a graph ends in its output")

    def _inputs(
        self, attribute: Callable[[str], Tensor], flat_inputs: list[Any]
    ) -> dict[tuple[Node, int], Any]:
        captured, mesh = self.captured, self.mesh
        given = {n: v for n, v in zip(captured.user_inputs, flat_inputs, strict=True) if n}
        values: dict[tuple[Node, int], Any] = {}
        for node in captured.graph.nodes:
            if node.op != "placeholder":
                break
            local: Tensor | None
            if node.name in captured.attributes:
                local = attribute(captured.attributes[node.name])
            else:
                local = given.get(node.name, captured.constants.get(node.name))
            if isinstance(local, torch.nn.Parameter):
                values[node, 0] = PartsOfGradient.apply(local, mesh)
            elif local is not None:
                values[node, 0] = _replicated(local, mesh)
        return values


class _Run:
    """One forward pass: values, and values moved, each move made once."""

    def __init__(self, program: Program, values: dict[tuple[Node, int], Any]) -> None:
        self._program = program
        self._values = values
        self._moved: dict[tuple[Node, int, Placement], Any] = {}

    def step(self, node: Node) -> None:
        strategy = self._program.strategies[node]
        on_locals = strategy.local or not strategy.divides
        get = self._get_local if on_locals else self._get
        args, kwargs = with_inputs(node, lambda x, n: get(x, strategy.inputs[n], strategy))
        results = node.target(*args, **kwargs)  # type: ignore[operator]
        single = isinstance(results, Tensor)
        values = (node.meta["val"],) if single else node.meta["val"]
        for n, result in enumerate((results,) if single else results):
            if on_locals and isinstance(result, Tensor):
                result = self._wrap(result, strategy.outputs[n], values[n])
            self._values[node, n] = result

    def _wrap(self, local: Tensor, place: Placement, like: Tensor) -> DTensor:
        return DTensor.from_local(
            local,
            self._program.mesh,
            [place],
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def _get_local(self, node: Node, place: Placement, strategy: Strategy) -> Tensor:
        # A whole input of an op that is cut gets a part of its gradient from each rank.
        grad = Partial() if place.is_replicate() and strategy.divides else place
        return self._get(node, place, strategy).to_local(grad_placements=[grad])

    def whole(self, x: Any) -> Any:
        if not isinstance(x, Node):
            return x
        return self._get(x, Replicate()).to_local()

    def _get(self, node: Node, place: Placement, _: Strategy | None = None) -> Any:
        producer, index = resolve(node)
        key = (producer, index, place)
        if key not in self._moved:
            value = self._values[producer, index]
            if value.placements[0] != place:
                value = value.redistribute(value.device_mesh, [place])
            self._moved[key] = value
        return self._moved[key]


def _replicated(local: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(local, mesh, [Replicate()], run_check=False)
