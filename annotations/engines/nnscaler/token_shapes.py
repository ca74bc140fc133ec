"""How an op of nnscaler's goes along its dims, even if nnscaler does not cut it.

    gelu           a b -> a b            it cuts a and b: any order of these goes through
    mean           a^ b^ -> 1            it cuts neither, but all orders have the same mean
    cumsum         a^ b -> a^ b          a might be a sum up to each place, and is
    torch.square   no annotation         pointwise, as torch's own tag says

nnscaler runs an op that it does not cut whole on every rank. An order of tokens goes through all
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nnscaler.graph.function.dimops import IRDimops, OpAnno
from nnscaler.graph.function.pyfunc import IRPyFunc
from nnscaler.graph.parser.register import CustomizedOps
from nnscaler.ir.cten import IRTensor

from annotations.rules import PartitionRule

from ..shuffled_tokens import MIXES
from .placement import leading

# Ops for which any order will do along dims that their one result lacks.
_REDUCING = {"mean", "norm", "max", "min", "any", "l1_loss"}
# Ops for which that is so along dims of their second tensor, the target: it holds numbers of
# classes, which keep their order.
_BY_CLASS = {"cross_entropy", "nll_loss"}


@dataclass(frozen=True)
class TokenShapes:
    """The dims of an op's tensors.

    Attributes:
        read, made: nnscaler's annotation of each tensor input and result.
        free: names of dims along which any order will do. otherwise: why it may not along others.
    """

    read: Sequence[Any]
    made: Sequence[Any]
    free: frozenset[str]
    otherwise: str

    def along(self, slot: int, dim: int, taken: frozenset[str]) -> tuple[str, str]:
        """The name of a dim of an input, and why its order does not go through; empty if it does.

        Args:
            taken: names of dims whose order the op is told.
        """
        shape = self.read[slot]
        name = "" if shape.ignore else leading(shape.dims[dim])
        dims = [d for each in (*self.read, *self.made) if not each.ignore for d in each.dims]
        together = [d for d in dims if name in d.identifiers]
        if any([x for x in d.identifiers if x != "1"] != [name] for d in together):
            return name, "nnscaler has tokens in one dim with others there"
        return name, "" if name in (taken or self.free) else self.otherwise


def token_shapes(node: Any, rule: PartitionRule | None) -> TokenShapes | str:
    """The dims of an op's tensors, or why they are not known.

    Args:
        rule: of an op of this package.
    """
    if rule is None and node.signature in CustomizedOps.kOpEmit:
        return "it was registered with nnscaler with an emit_fn, and may do more than it shows"
    if isinstance(node, IRDimops):
        read = _of_tensors(node.anno.inputs(), node.inputs())
        made = _of_tensors(node.anno.outputs(), node.outputs())
        cut = {leading(node.anno.input(n).dims[dim]) for n, dim in node.transform_space()}
        if rule is not None:
            return TokenShapes(read, made, frozenset(cut - rule.shard_aware.keys()), MIXES)
        if node.name in _REDUCING and len(made) == 1:
            cut |= _names(read) - _names(made)
        if node.name in _BY_CLASS and len(made) == 1:
            cut |= _names(read[1:2]) - _names(made)
        mixes = "nnscaler does not cut it on its tokens: it may mix them or depend on their places"
        return TokenShapes(read, made, frozenset(cut), mixes)
    if isinstance(node, IRPyFunc):
        return "nnscaler runs it as a Python function, without gradients"
    describe = _UNCUT.get(node.signature, _pointwise)
    text = describe(node)
    if text is None:
        return "nnscaler has no annotation for it"
    shapes = OpAnno(text)
    free = _names([*shapes.inputs(), *shapes.outputs()])
    return TokenShapes(shapes.inputs(), shapes.outputs(), frozenset(free), MIXES)


def _of_tensors(shapes: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The annotation of each tensor."""
    pairs = zip(shapes, values, strict=True)
    return [shape for shape, value in pairs if isinstance(value, IRTensor)]


def _names(shapes: Sequence[Any]) -> set[str]:
    dims = [dim for shape in shapes if not shape.ignore for dim in shape.dims]
    return {name for dim in dims for name in dim.identifiers if not name.isdecimal()}


def _shapes(values: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in values if isinstance(x, IRTensor)]


def _text(read: Sequence[Sequence[str]], made: Sequence[str]) -> str:
    return f"{', '.join(' '.join(dims) or '1' for dims in read)} -> {' '.join(made) or '1'}"


def _pointwise(node: Any) -> str | None:
    """The annotation of an op that torch tags as pointwise: a dim that is as long as the result's
    has a name."""
    packet = getattr(torch.ops.aten, node.name, None)
    if packet is None or not node.signature.startswith("torch."):
        return None
    tags = getattr(packet, packet.overloads()[0]).tags
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags:
        return None
    read, results = _shapes(node.inputs()), _shapes(node.outputs())
    if len(results) != 1 or torch.broadcast_shapes(*read) != results[0]:
        return None
    [made] = results
    names = [f"a{n}" for n in range(len(made))]

    def dims(shape: tuple[int, ...]) -> list[str]:
        first = len(made) - len(shape)
        sizes = zip(shape, names[first:], made[first:], strict=True)
        return [name if size == whole else str(size) for size, name, whole in sizes]

    return _text([dims(shape) for shape in read], names)


def _transposed(node: Any) -> str | None:
    [made] = _shapes(node.outputs())
    return "a b -> b a" if len(made) == 2 else None


def _normalised(node: Any) -> str | None:
    """The annotation of an op that normalises the last dims, as many as it is given; None if those
    are not known yet."""
    given = [*node.inputs(), node.kwargs.get("normalized_shape")]
    shape = next((x for x in given if isinstance(x, list | tuple)), None)
    if shape is None:
        return None
    last = len(shape)
    x, *weights = _shapes(node.inputs())
    names = [f"a{n}" for n in range(len(x) - last)]
    dims = [*names, *map(str, x[len(x) - last :])]
    return _text([dims, *(list(map(str, shape)) for shape in weights)], dims)


_UNCUT: dict[str, Callable[[Any], str | None]] = {
    "torch.t": _transposed,
    "torch.nn.functional.rms_norm": _normalised,
}
