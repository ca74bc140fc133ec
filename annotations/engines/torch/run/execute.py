"""Running a planned graph: each op on DTensors with the placements of its strategy.

Moves between strategies are paths of collectives (:mod:`..strategies.reshard`). What an annotated
op moves inside is its own affair, through the rule that it was registered with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx import Node

from ..capture import checkpointed
from ..capture.capture import Captured
from ..capture.nodes import is_getitem, resolve, with_inputs
from ..module.parameters import cast, replicated
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Places, share, unsplit
from ..strategies.reshard import Move, brought
from . import recompute


class PartsOfGradient(torch.autograd.Function):
    """A parameter, whole on every rank, as a DTensor; its gradient stays this rank's part.

    The parts add up to the gradient over the ranks of the plan. Adding them up is left to
    ``sync_grad``, which does it once for all parameters.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, parameter: Tensor, mesh: DeviceMesh, places: Places
    ) -> Any:
        """The parameter as it is read; nothing moves."""
        return brought(replicated(parameter.detach(), mesh), places)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """This rank's part of the gradient."""
        mesh, places = grad.device_mesh, grad.placements
        local = grad.to_local()
        # The same on every rank of an axis, so that each contributes an equal part.
        copies = math.prod(mesh.size(axis) for axis, p in enumerate(places) if p.is_replicate())
        local = local / copies if copies > 1 else local
        if not any(p.is_shard() for p in places):
            return local, None, None
        # DTensor's compute_local_shape_and_global_offset cannot be traced: it reads a tensor.
        part = whole = local.new_zeros(grad.shape)
        for axis, place in enumerate(places):
            if isinstance(place, Shard):
                size, n, r = part.shape[place.dim], mesh.size(axis), mesh.get_local_rank(axis)
                start = min(size, share(size, n, 0) * r)
                part = part.narrow(place.dim, start, share(size, n, r))
        part.copy_(local)
        return whole, None, None


class _Wrap(torch.autograd.Function):
    """A rank's result as a DTensor; the gradient of a partial sum is that of each of its parts."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, local: Tensor, mesh: DeviceMesh, places: Places, shape: Any, stride: Any
    ) -> Any:
        ctx.places = places
        return DTensor.from_local(
            local.detach(), mesh, places, run_check=False, shape=shape, stride=stride
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:  # type: ignore[override]
        local = brought(grad, tuple(map(unsplit, ctx.places))).to_local()
        return local, None, None, None, None


@dataclass(frozen=True, eq=False)
class Program:
    """A captured graph with a strategy for every op.

    Attributes:
        strategies: how each op runs; ``getitem`` nodes follow their producer.
        parameters: placements of those that are kept in parts, by their names in the module.
        compute_dtype: what parameters are cast to where they are read; None leaves them.
        traced: whether a graph is made of the run, in which checkpointed calls are marked.
    """

    captured: Captured
    strategies: Mapping[Node, Strategy]
    mesh: DeviceMesh
    parameters: Mapping[str, Places] = field(default_factory=dict)
    compute_dtype: torch.dtype | None = None
    traced: bool = False

    @property
    def checkpoints(self) -> bool:
        """Whether some ops are of a checkpointed call."""
        return any(checkpointed.region_of(n) is not None for n in self.captured.graph.nodes)

    def __call__(self, attribute: Callable[[str], Tensor], flat_inputs: list[Any]) -> list[Any]:
        """Run the forward.

        Args:
            attribute: a parameter or buffer by its name in the module; those in ``parameters`` are
                DTensors with these placements.
            flat_inputs: the user's inputs, whole, the same on every rank of the plan.
        Returns:
            The flat results, whole on every rank.
        """
        values = self._inputs(attribute, flat_inputs)
        run = _Run(self, values)
        nodes = self.captured.graph.nodes
        ops = [node for node in nodes if node.op == "call_function" and not is_getitem(node)]
        for part in recompute.parts(ops):
            if isinstance(part, Node):
                run.step(part)
            else:
                run.steps(part)
        output = next(iter(reversed(nodes)))
        return [run.whole(x) for x in output.args[0]]

    def _inputs(
        self, attribute: Callable[[str], Tensor], flat_inputs: list[Any]
    ) -> dict[tuple[Node, int], Any]:
        captured, mesh = self.captured, self.mesh
        given = {n: v for n, v in zip(captured.user_inputs, flat_inputs, strict=True) if n}
        values: dict[tuple[Node, int], Any] = {}
        for node in captured.graph.nodes:
            if node.op != "placeholder":
                break
            local: Any
            if node.name in captured.attributes:
                local = attribute(captured.attributes[node.name])
                local = cast(local, self.compute_dtype)
            else:
                local = given.get(node.name, captured.constants.get(node.name))
            if isinstance(local, torch.nn.Parameter | DTensor):
                values[node, 0] = local
            elif local is not None:
                values[node, 0] = replicated(local, mesh)
        return values


class _Run:
    """One forward pass: values, and values moved, each move made once."""

    def __init__(self, program: Program, values: dict[tuple[Node, int], Any]) -> None:
        self._program = program
        self._values = values
        self._moved: dict[tuple[Node, int, Places, Places], Any] = {}

    def step(self, node: Node) -> None:
        strategy = self._program.strategies[node]

        def get(x: Node, n: int) -> Any:
            value = self._get(x, strategy.inputs[n], strategy.grads[n])
            return value.to_local(grad_placements=strategy.grads[n]) if strategy.local else value

        args, kwargs = with_inputs(node, get)
        results = node.target(*args, **kwargs)  # type: ignore[operator]
        single = isinstance(results, Tensor)
        values = (node.meta["val"],) if single else node.meta["val"]
        for n, result in enumerate((results,) if single else results):
            if strategy.local and isinstance(result, Tensor):
                like, places = values[n], strategy.outputs[n]
                result = _Wrap.apply(result, self._program.mesh, places, like.shape, like.stride())
            self._values[node, n] = result

    def steps(self, nodes: Sequence[Node]) -> None:
        """Ops whose forward is to run again in the backward."""
        if self._program.traced:
            with checkpointed.region(nodes):
                for node in nodes:
                    self.step(node)
            return

        def execute(values: dict[tuple[Node, int], Any]) -> None:
            run = _Run(self._program, values)
            for node in nodes:
                run.step(node)

        if torch.is_grad_enabled():
            recompute.run_again(nodes, self._values, execute)
        else:
            execute(self._values)

    def whole(self, x: Any) -> Any:
        """A result of the graph, whole on every rank."""
        if not isinstance(x, Node):
            return x
        everywhere = (Replicate(),) * self._program.mesh.ndim
        return self._get(x, everywhere, everywhere).to_local(grad_placements=everywhere)

    def _get(self, node: Node, places: Places, grads: Places) -> Any:
        producer, index = resolve(node)
        key = (producer, index, places, grads)
        if key not in self._moved:
            value = self._values[producer, index]
            if not isinstance(value, DTensor):
                value = PartsOfGradient.apply(value, self._program.mesh, places)
            else:
                source = tuple(value.placements)
                if source != places or tuple(map(unsplit, source)) != grads:
                    value = Move.apply(value, places)
            self._moved[key] = value
        return self._moved[key]
