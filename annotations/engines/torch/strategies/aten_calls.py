"""Calls of torch's ops: their arguments and shapes, and how their annotations are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Node

from annotations.solving import TensorShape

from ..capture.nodes import argument_of, tensor_inputs, values_of

Names = Sequence[str]


def name_of(node: Node) -> str:
    """``aten.sum`` of ``aten.sum.dim_IntList``."""
    return str(node.target).rsplit(".", 1)[0]


def shapes_in(node: Node) -> list[TensorShape]:
    """Of an op's tensor inputs."""
    return [tuple(x.meta["val"].shape) for x in tensor_inputs(node)]


def shapes_out(node: Node) -> list[TensorShape]:
    """Of its results."""
    return [tuple(x.shape) for x in values_of(node)]


def named_dims(node: Node, name: str) -> set[int]:
    """The dims of the first input that an argument names; all where it names none."""
    given, ndim = argument_of(node, name), len(shapes_in(node)[0])
    dims = [given] if isinstance(given, int) else given
    return {dim % ndim for dim in dims} if dims and ndim else set(range(ndim))


def written(inputs: Iterable[Names], outputs: Iterable[Names]) -> str:
    """The annotation of tensors with these dims."""
    sides = (", ".join(" ".join(dims) or "()" for dims in side) for side in (inputs, outputs))
    return " -> ".join(sides)


def as_sizes(shape: Iterable[int]) -> list[str]:
    """Dims that are written as their sizes."""
    return [str(size) for size in shape]


def names_of(count: int) -> list[str]:
    """A name for each of so many dims."""
    return [f"a{n}" for n in range(count)]


def broadcast(shape: TensorShape, names: Names, result: TensorShape) -> list[str]:
    """The dims of a tensor that broadcasts to ``result``, which has these names."""
    last = len(result) - len(shape)
    pairs = zip(shape, names[last:], result[last:], strict=True)
    return [name if size == whole else str(size) for size, name, whole in pairs]
