"""Running a planned graph: each op on DTensors with the placements of its strategy.

Moves between strategies are paths of collectives (:mod:`..strategies.reshard`). What an annotated
op moves inside is up to the op, through the rule that it was registered with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx import Node

from annotations.registry import record_of

from ..capture import checkpointed
from ..capture.capture import Captured
from ..capture.nodes import (
    is_getitem,
    is_size,
    resolve,
    sizes_in,
    tensor_inputs,
    values_of,
    with_inputs,
)
from ..capture.replaced_parameters import cast
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Placements, gradient_of, share
from ..strategies.reshard import Move, brought
from .local_graph import output_of
from .recompute import Values, run_again


def replicated(local: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that is whole and the same on every rank, as a DTensor."""
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def elsewhere(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Whether a tensor is on another device than the ranks compute on, e.g. lengths on the host."""
    return tensor.device.type != mesh.device_type


class PartsOfGradient(torch.autograd.Function):
    """A parameter, whole on every rank, as a DTensor; its gradient stays this rank's part of a sum
    until ``sync_grad``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, parameter: Tensor, mesh: DeviceMesh, placements: Placements
    ) -> Any:
        """The parameter as it is read; nothing moves."""
        return brought(replicated(parameter.detach(), mesh), placements)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """This rank's part of the gradient."""
        mesh, placements = grad.device_mesh, grad.placements
        local = grad.to_local()
        # Along an axis that replicates it, it is the same on every rank: each gives an equal part.
        copies = math.prod(mesh.size(axis) for axis, p in enumerate(placements) if p.is_replicate())
        local = local / copies if copies > 1 else local
        if not any(p.is_shard() for p in placements):
            return local, None, None
        # DTensor's compute_local_shape_and_global_offset cannot be traced: it reads a tensor.
        part = whole = local.new_zeros(grad.shape)
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                dim, n, r = placement.dim, mesh.size(axis), mesh.get_local_rank(axis)
                size = part.shape[dim]
                start = min(size, share(size, n, 0) * r)
                part = part.narrow(dim, start, share(size, n, r))
        part.copy_(local)
        return whole, None, None


class _Wrap(torch.autograd.Function):
    """A rank's result as a DTensor; the gradient of a partial sum is that of each of its parts."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, local: Tensor, mesh: DeviceMesh, placements: Placements, shape: Any, stride: Any
    ) -> Any:
        ctx.placements = placements
        return DTensor.from_local(
            local.detach(), mesh, placements, run_check=False, shape=shape, stride=stride
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:  # type: ignore[override]
        local = brought(grad, gradient_of(ctx.placements)).to_local()
        return local, None, None, None, None


@dataclass(frozen=True, eq=False)
class Program:
    """A captured graph with a strategy for every op; ``getitem`` nodes follow their producer.
    Parameters are cast to ``compute_dtype``, if it is given, where they are read."""

    captured: Captured
    strategies: Mapping[Node, Strategy]
    mesh: DeviceMesh
    compute_dtype: torch.dtype | None = None

    def __call__(self, attribute: Callable[[str], Tensor], flat_inputs: list[Any]) -> list[Any]:
        """Run the forward: the flat results, whole on every rank.

        Args:
            attribute: a parameter or buffer by its name; what the plan shards is a DTensor.
            flat_inputs: the user's inputs, whole, the same on every rank of the plan.
        """
        return self.run(self.given(attribute, flat_inputs))

    def given(self, attribute: Callable[[str], Tensor], flat_inputs: list[Any]) -> dict[str, Any]:
        """The value of each placeholder, by its name."""
        captured = self.captured
        given: dict[str, Any] = {n: attribute(of) for n, of in captured.attributes.items()}
        given |= captured.constants
        pairs = zip(captured.user_inputs, flat_inputs, strict=True)
        return given | {name: value for name, value in pairs if name}

    def one(self, node: Node, inputs: Mapping[tuple[Node, int], Tensor]) -> list[Any]:
        """The results of one op by itself, whole on every rank.

        Args:
            inputs: tensors that are whole and the same on every rank, by the op that makes each and
                the index of its result.
        """
        run = _Run(self, {key: replicated(x, self.mesh) for key, x in inputs.items()}, {})
        run.steps([node])
        return [run.whole(node, index) for index in range(len(values_of(node)))]

    def run(self, given: Mapping[str, Any], *, traced: bool = False) -> list[Any]:
        """The flat results. If ``traced``, the run is traced into a graph, in which checkpointed
        calls are marked."""
        graph = self.captured.graph
        values: Values = {}
        for node in graph.find_nodes(op="placeholder"):
            value: Any = given.get(node.name)
            if node.name in self.captured.attributes:
                value = cast(value, self.compute_dtype)
            if isinstance(value, torch.nn.Parameter | DTensor):
                values[node, 0] = value
            elif value is not None:
                stays = elsewhere(value, self.mesh)
                values[node, 0] = value if stays else replicated(value, self.mesh)
        run = _Run(self, values, sizes_in(graph, given))
        calls = [node for node in graph.nodes if node.op == "call_function"]
        ops = [node for node in calls if not is_getitem(node) and not is_size(node)]
        for region, part in itertools.groupby(ops, checkpointed.region_of):
            nodes = list(part)
            if region is not None and traced:
                with checkpointed.region(region):
                    run.steps(nodes)
            elif region is not None and torch.is_grad_enabled():
                run_again(nodes, values, lambda inner, ops: _Run(self, inner, run.sizes).steps(ops))
            else:
                run.steps(nodes)
        results: Any = output_of(graph).args[0]
        return [run.whole(*resolve(x)) if isinstance(x, Node) else x for x in results]


class _Run:
    """One forward pass: its values, and values moved to other placements, each move made once."""

    def __init__(self, program: Program, values: Values, sizes: Mapping[Node, Any]) -> None:
        self._program, self._values, self.sizes = program, values, sizes
        self._moved: dict[tuple[Node, int, Placements, Placements], Any] = {}

    def steps(self, nodes: Iterable[Node]) -> None:
        """Run ops in order."""
        for node in nodes:
            self._step(node, self._program.strategies[node])

    def _step(self, node: Node, strategy: Strategy) -> None:
        keys = [resolve(x) for x in tensor_inputs(node)]
        on_host = [n for n, key in enumerate(keys) if self._is_host(self._values[key])]
        # Annotated ops read whole lengths on the host without a wait for the device.
        reads = record_of(node.target) is not None or len(on_host) == len(keys)
        for n in on_host:
            if not (reads and all(p.is_replicate() for p in strategy.inputs[n])):
                self._values[keys[n]] = replicated(self._values[keys[n]], self._program.mesh)

        def get(x: Node, n: int) -> Any:
            key = resolve(x)
            if self._is_host(self._values[key]):
                return self._values[key]
            value = self._get(*key, strategy.inputs[n], strategy.grads[n])
            return value.to_local(grad_placements=strategy.grads[n]) if strategy.local else value

        args, kwargs = with_inputs(node, get, self.sizes)
        results = node.target(*args, **kwargs)  # type: ignore[operator]
        for n, result in enumerate((results,) if isinstance(results, Tensor) else results):
            if strategy.local and isinstance(result, Tensor) and not self._is_host(result):
                placements, mesh = strategy.outputs[n], self._program.mesh
                replicated_here = all(p.is_replicate() for p in placements)
                whole = result if replicated_here else values_of(node)[n]
                result = _Wrap.apply(result, mesh, placements, whole.shape, whole.stride())
            self._values[node, n] = result

    def _is_host(self, value: Any) -> bool:
        """Whether a value is a tensor on another device than the ranks', whole on each rank."""
        plain = isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter | DTensor)
        return plain and elsewhere(value, self._program.mesh)

    def whole(self, producer: Node, index: int) -> Any:
        """A result of an op, whole on every rank."""
        everywhere = (Replicate(),) * self._program.mesh.ndim
        value = self._values[producer, index]
        if not isinstance(value, Tensor) or self._is_host(value):
            return value
        value = self._get(producer, index, everywhere, everywhere)
        return value.to_local(grad_placements=everywhere)

    def _get(self, producer: Node, index: int, placements: Placements, grads: Placements) -> Any:
        """A value with ``placements``, its gradient with ``grads``."""
        key = (producer, index, placements, grads)
        if key not in self._moved:
            value = self._values[producer, index]
            if not isinstance(value, DTensor):
                value = PartsOfGradient.apply(value, self._program.mesh, placements)
            elif value.placements != placements or gradient_of(value.placements) != grads:
                value = Move.apply(value, placements)
            self._moved[key] = value
        return self._moved[key]
