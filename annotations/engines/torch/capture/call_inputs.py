"""What a captured graph takes: a call's arguments, checked and made to fit.

Shapes are part of a graph. But the last element of cumulative lengths may be repeated any number of
times, so a graph for eight documents also takes batches of fewer
(:attr:`PartitionRule.repeatable`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from annotations.registry import record_of

from .nodes import INTEGER_COPIES

Dims = frozenset[tuple[int, int]]  # numbers of flat inputs, and of their dims


class CaptureError(ValueError):
    """The module does something that the engine cannot run in parallel, or is called wrongly."""


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of nested arguments, each with its path, such as ``batch.0.tokens``."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return [
        (".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path), value)
        for path, value in leaves
    ]


@dataclass(frozen=True)
class CallInputs:
    """The inputs of a graph.

    Attributes:
        signature: of the module's ``forward``.
        spec: how its arguments nest, by name.
        examples: the flat inputs that the graph was captured with.
        repeatable: which of them may be filled up by repeating their last element.
        open: inputs and their dims whose size may differ, see :mod:`.open_sizes`.
    """

    signature: inspect.Signature
    spec: pytree.TreeSpec
    examples: Sequence[Any]
    repeatable: frozenset[int]
    open: Dims = frozenset()

    @property
    def open_inputs(self) -> set[int]:
        """Numbers of the inputs that have open sizes."""
        return {n for n, _ in self.open}

    def differing(self, flat: Sequence[Any]) -> Dims:
        """Inputs and their dims whose size in ``flat`` differs from the example's, except for
        inputs that can be filled up."""
        return frozenset(
            (n, dim)
            for n, example in enumerate(self.examples)
            if isinstance(example, Tensor) and n not in self.repeatable
            for dim, size in enumerate(example.shape)
            if flat[n].shape[dim] != size
        )

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """A call's flat inputs, of whatever shapes.

        Raises:
            CaptureError: they differ from the example's in structure, dtype or value.
        """
        arguments = by_name(self.signature.bind(*args, **kwargs))
        captured, called = (sorted(x) for x in (self.spec.context, arguments))
        if captured != called:
            raise CaptureError(
                f"captured with the arguments {', '.join(captured)}, called with "
                f"{', '.join(called)}; parallelize the module again for other arguments"
            )
        in_order = {name: arguments[name] for name in self.spec.context}  # of **kwargs, too
        flat, spec = pytree.tree_flatten(in_order)
        if spec != self.spec:
            raise CaptureError(
                f"called with {sorted(arguments)} nested as {spec}, but the module was captured "
                f"with {self.spec}; pass lengths that change as a tensor"
            )
        for (name, value), example in zip(named_leaves(in_order), self.examples, strict=True):
            _check(name, value, example)
        return flat

    def fitted(self, flat: Sequence[Any]) -> list[Any] | None:
        """These inputs in the form that the graph takes; None if it takes other shapes."""
        if not self.differing(flat) <= self.open:
            return None
        fitted = list(flat)
        for n in self.repeatable:
            count = len(self.examples[n])
            if not 0 < len(flat[n]) <= count:
                return None
            fitted[n] = _filled(flat[n], count) if len(flat[n]) < count else flat[n]
        for n in self.open_inputs:
            fitted[n] = fitted[n].contiguous()  # strides would tell the size
        return fitted

    def one_longer(self) -> dict[str, Any]:
        """The example's arguments by name, with each repeatable one longer by one element; a tensor
        that is given twice stays one."""
        given = {id(self.examples[n]): self.examples[n] for n in self.repeatable}
        longer = {key: _filled(lengths, len(lengths) + 1) for key, lengths in given.items()}
        values = [
            longer[id(value)] if n in self.repeatable else value
            for n, value in enumerate(self.examples)
        ]
        return pytree.tree_unflatten(values, self.spec)

    def with_room(self, values: Sequence[Any], flat: Sequence[Any]) -> dict[str, Any]:
        """Flat inputs as arguments by name, with tensors of lengths filled up to what a graph for
        ``flat`` has."""
        filled = list(values)
        for n, room in self.room_for(flat):
            filled[n] = _filled(values[n], room)
        return pytree.tree_unflatten(filled, self.spec)

    def may_open(self, flat: Sequence[Any], ranks: int) -> bool:
        """Whether a graph of the example with open sizes may be the one for these sizes."""
        sizes = ((self.examples[n].shape[d], flat[n].shape[d]) for n, d in self.differing(flat))
        return all(
            min(old, new) > 1 and (not is_multiple(old, ranks) or new % ranks == 0)
            for old, new in sizes
        )

    def room_for(self, flat: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        """For each repeatable input its number, and how long it is in a graph for these inputs."""
        lengths = ((n, len(flat[n]), len(self.examples[n])) for n in sorted(self.repeatable))
        return tuple(
            (n, known if length <= known else (1 << (length - 2).bit_length()) + 1)
            for n, length, known in lengths
        )


def _filled(lengths: Tensor, count: int) -> Tensor:
    """[n] -> [count], its last element repeated."""
    return torch.cat([lengths, lengths[-1:].expand(count - len(lengths))])


def by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """A call's arguments by name, including those that ``**kwargs`` takes."""
    named = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name, {})
    return named


def is_multiple(size: int, ranks: int) -> bool:
    """Whether an open size is traced as a multiple of the number of ranks, which takes less time
    than finding out, wherever it matters, that ranks share it evenly."""
    return ranks > 1 and size % ranks == 0 and size >= 2 * ranks


def left_open(arguments: Mapping[str, Any], dims: Dims, multiple: int) -> Any:
    """What torch.export calls dynamic shapes: all sizes are fixed but those of ``dims``. Sizes that
    are multiples in the example (:func:`is_multiple`) stay multiples; they get named symbols, so
    that equal sizes stay equal."""
    flat, spec = pytree.tree_flatten(dict(arguments))
    wanted: list[Any] = [None] * len(flat)
    known: dict[int, Any] = {}
    for n, dim in sorted(dims):
        size = flat[n].shape[dim]
        if size not in known:
            named = torch.export.Dim(f"size{len(known)}", min=2)
            even = is_multiple(size, multiple)
            known[size] = multiple * named if even else torch.export.Dim.AUTO
        wanted[n] = {**(wanted[n] or {}), dim: known[size]}
    return pytree.tree_unflatten(wanted, spec)


def _check(name: str, value: Any, example: Any) -> None:
    if not isinstance(example, Tensor):
        if value != example:
            raise CaptureError(
                f"{name}: expected {example!r} as in dummy_forward_args, got {value!r}; what is no "
                "tensor is a constant of the graph: pass what changes, such as lengths, as a tensor"
            )
        return
    shown = f"{tuple(example.shape)} {example.dtype}"
    if not isinstance(value, Tensor):
        raise CaptureError(f"{name}: expected a tensor {shown}, got {type(value).__name__}")
    if value.dtype != example.dtype or value.ndim != example.ndim:
        raise CaptureError(
            f"{name}: expected {shown} as in dummy_forward_args, got {tuple(value.shape)} "
            f"{value.dtype}; dtypes and numbers of dims are fixed when a module is parallelized"
        )


def repeatable_inputs(graph: Graph, user_inputs: Sequence[str | None]) -> frozenset[int]:
    """Which of the user's inputs are read only by ops that let their last element be repeated.

    If there is one, such as cumulative lengths of queries, a row of integers that nothing reads,
    such as those of keys, is one too.
    """
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    given = {n: nodes[name] for n, name in enumerate(user_inputs) if name is not None}
    read = {n for n, node in given.items() if node.users and _repeatable(node)}
    unread = {n for n, node in given.items() if not node.users and _is_row_of_integers(node)}
    return frozenset(read | unread if read else ())


def _is_row_of_integers(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim != 1:
        return False
    return len(value) > 0 and not value.dtype.is_floating_point


def _repeatable(node: Node) -> bool:
    for user in node.users:
        if user.target in INTEGER_COPIES:
            if not _repeatable(user):
                return False
            continue
        record = record_of(user.target)
        if record is None:
            return False
        given = record.arguments(user.args, user.kwargs)
        if any(x is node and name not in record.rule.repeatable for name, x in given.items()):
            return False
    return True
