"""Asks DTensor how an op may run, by running it on meta tensors with each possible placement.

Placements with which forward and backward ran without communication are a strategy. So DTensor
itself is the one source of truth for what it can do, whatever its version.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode

from annotations.library.dtensor import of_parts

from ..capture.nodes import tensor_inputs, values_of, with_inputs
from .one_axis import AxisStrategy
from .placements import Placements, gradient_of, local_shape

# Beyond this many tensor inputs only uniform placements are tried.
ALL_COMBINATIONS_INPUTS = 3


# Those of torch's ops that send something: namespaces, and one op of DTensor's own. It is given by
# name, so that a version of torch without it does not fail here.
COLLECTIVES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"}
ALL_TO_ALL = "_dtensor.shard_dim_alltoall.default"
# More calls than an op makes on the parts of its tensors. DTensor makes as many where a result is
# cut into thousands of strided pieces, which is no placement that is used here.
MOST_CALLS = 1000


class _Refused(Exception):
    """What was tried needs a collective, or strided pieces."""


class _WithoutCollectives(TorchDispatchMode):
    """Stops what runs in this mode at the first collective, or after :data:`MOST_CALLS`."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor itself turns an op into collectives
        self._calls += 1
        if getattr(func, "namespace", "") in COLLECTIVES or str(func) == ALL_TO_ALL:
            raise _Refused(str(func))
        if self._calls > MOST_CALLS:
            raise _Refused(f"{self._calls} calls")
        return func(*args, **(kwargs or {}))


class Answer(NamedTuple):
    """Placements of results and of the inputs' gradients."""

    outputs: tuple[Placements, ...]
    grads: tuple[Placements, ...]


def ask_dtensor(
    node: Node, inputs: Sequence[Node], mesh: DeviceMesh, axis: int
) -> list[AxisStrategy]:
    """The ways to run an op cut along one axis of the mesh."""
    if mesh.ndim > 1:
        assert mesh.mesh_dim_names is not None
        mesh = mesh[mesh.mesh_dim_names[axis]]
    choices = [_placements(x.meta["val"], mesh.size()) for x in inputs]
    if len(inputs) <= ALL_COMBINATIONS_INPUTS:
        combinations = list(itertools.product(*choices))
    else:
        combinations = [(p,) * len(inputs) for p in choices[0] if all(p in c for c in choices)]
    found = []
    for placements in combinations:
        if all(p.is_replicate() for p in placements):
            continue
        answer = _run_on_meta(node, inputs, [(p,) for p in placements], mesh)
        if answer is not None:
            outputs, grads = (tuple(p for (p,) in side) for side in answer)
            found.append(AxisStrategy(placements, outputs, grads))
    return found


def confirms(
    node: Node, inputs: Sequence[Placements], outputs: Sequence[Placements], mesh: DeviceMesh
) -> bool:
    """Whether DTensor runs an op like this on the whole mesh, after trials on single axes only."""
    answer = _run_on_meta(node, tensor_inputs(node), inputs, mesh)
    return answer is not None and answer.outputs == tuple(outputs)


def _placements(value: Tensor, parts: int) -> list[Placement]:
    cuts = [Shard(dim) for dim in range(value.ndim) if value.shape[dim] >= parts]
    return [Replicate(), *cuts]


def _run_on_meta(
    node: Node, inputs: Sequence[Node], placements: Sequence[Placements], mesh: DeviceMesh
) -> Answer | None:
    """The resulting placements; None if the op communicates or cannot run."""
    leaves: list[Any] = []

    def meta(x: Node, n: int) -> Tensor:
        value = x.meta["val"]
        local = torch.empty(
            local_shape(value.shape, placements[n], mesh.shape), dtype=value.dtype, device="meta"
        )
        like = of_parts(local, mesh, placements[n], value.shape)
        leaves.append(like.requires_grad_(value.is_floating_point()))
        return leaves[-1]

    args, kwargs = with_inputs(node, meta)
    # DTensor logs how it would communicate; it is only being asked.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with torch.enable_grad(), _WithoutCollectives():
            results = node.target(*args, **_on_meta(kwargs))  # type: ignore[operator]
            flat = [results] if isinstance(results, Tensor) else list(results)
            _differentiate(flat)
    except Exception:
        # It communicates, or DTensor refuses, which it does in many ways (NotImplementedError,
        # RuntimeError, AssertionError, ...). Each means the same: the op does not run like this. It
        # still runs whole.
        return None
    finally:
        logging.disable(before)
    outputs = tuple(_placements_of(r) for r in flat)
    grads = tuple(_placements_of(x.grad) if x.grad is not None else x.placements for x in leaves)
    whole = [value.shape for value in values_of(node)]
    if not all(_is_part(r, shape) for r, shape in zip(flat, whole, strict=True)):
        return None
    if not all(_is_part(x.grad, x.shape) for x in leaves if x.grad is not None):
        return None
    plain = all(
        _is_plain(p) for side in (outputs, grads) for placements in side for p in placements
    )
    return Answer(outputs, grads) if plain else None


def _placements_of(result: Any) -> Placements:
    return tuple(result.placements) if isinstance(result, DTensor) else ()


def _is_part(result: Any, shape: torch.Size) -> bool:
    """Whether a rank holds the part of a tensor of this shape that the placements say."""
    if not isinstance(result, DTensor):
        return True
    expected = local_shape(shape, tuple(result.placements), result.device_mesh.shape)
    return result.shape == shape and tuple(result.to_local().shape) == tuple(expected)


def _is_plain(placement: Placement) -> bool:
    return type(placement) in (Replicate, Shard) or placement == Partial("sum")


def _differentiate(results: Sequence[Any]) -> None:
    """Run the backward too: some ops run on a cut tensor but their backward does not."""
    made = [r for r in results if isinstance(r, DTensor) and r.requires_grad]
    grads = [r.redistribute(placements=gradient_of(r.placements)) for r in made]
    torch.autograd.backward(made, [grad.detach() for grad in grads])


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: torch.device("meta") if k == "device" and v else v for k, v in kwargs.items()}
