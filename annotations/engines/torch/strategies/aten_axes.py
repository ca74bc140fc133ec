"""The axes of aten ops, by families: their dims along which any order of positions will do.

Views are not among them: they keep the order of all elements, see :mod:`.token_axes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..capture.nodes import tensor_inputs

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """Positions of an op's tensors that belong together.

    Attributes:
        inputs: of each tensor input, the dim; None where it has not this axis.
        outputs: of each result, likewise.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


def name_of(node: Node) -> str:
    """``aten.sum`` of ``aten.sum.dim_IntList``."""
    return str(node.target).rsplit(".", 1)[0]


def shapes_in(node: Node) -> list[Shape]:
    """Of an op's tensor inputs."""
    return [tuple(x.meta["val"].shape) for x in tensor_inputs(node)]


def shapes_out(node: Node) -> list[Shape]:
    """Of its results."""
    value = node.meta["val"]
    return [tuple(x.shape) for x in ([value] if isinstance(value, Tensor) else value)]


def argument_of(node: Node, name: str) -> Any:
    """An argument of a call by its name in the op's schema."""
    for n, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            if n < len(node.args):
                return node.args[n]
            return node.kwargs.get(name, argument.default_value if _has_default(argument) else None)
    return None


def _has_default(argument: Any) -> bool:
    return bool(argument.has_default_value())


def _dims(node: Node, name: str, ndim: int) -> set[int]:
    """The dims that an argument names; all where it names none."""
    given = argument_of(node, name)
    if given is None or (isinstance(given, list | tuple) and not given):
        return set(range(ndim))
    return {dim % ndim for dim in ([given] if isinstance(given, int) else given)}


def elementwise(node: Node) -> Iterable[Axis]:
    """Broadcast: dims are counted from the last."""
    (result,), inputs = shapes_out(node), shapes_in(node)
    for dim, size in enumerate(result):
        own = [dim - len(result) + len(shape) for shape in inputs]
        sizes = [shape[d] if d >= 0 else 1 for d, shape in zip(own, inputs, strict=True)]
        if all(each in (1, size) for each in sizes):  # not where repeat lays out copies
            dims = (d if n == size and d >= 0 else None for d, n in zip(own, sizes, strict=True))
            yield Axis(tuple(dims), (dim,))


def _same_dims(node: Node, but: set[int]) -> Iterable[Axis]:
    """All tensors of the call have as many dims and go along one by one."""
    inputs, n_outputs = shapes_in(node), len(shapes_out(node))
    for dim, size in enumerate(inputs[0]):
        alike = all(len(s) == len(inputs[0]) and s[dim] == size for s in inputs)
        if dim not in but and alike:
            yield Axis((dim,) * len(inputs), (dim,) * n_outputs)


def _but(argument: str) -> Callable[[Node], Iterable[Axis]]:
    """Positions belong together only along the dims that ``argument`` names."""
    return lambda node: _same_dims(node, _dims(node, argument, len(shapes_in(node)[0])))


def _free(node: Node) -> Iterable[Axis]:
    return _same_dims(node, set())


def _leading(node: Node) -> Iterable[Axis]:
    """The leading dims are kept as they are."""
    (source,), (target,) = shapes_in(node), shapes_out(node)
    return (Axis((dim,), (dim,)) for dim in range(min(len(source), len(target))))


def _padded(node: Node) -> Iterable[Axis]:
    ndim = len(shapes_in(node)[0])
    return _same_dims(node, {ndim - 1 - n for n in range(len(argument_of(node, "pad")) // 2)})


def _last_two(node: Node) -> Iterable[Axis]:
    ndim = len(shapes_in(node)[0])
    return _same_dims(node, {ndim - 2, ndim - 1})


def _inactive(node: Node) -> Iterable[Axis]:
    """Dropout that drops nothing, as capture has seen to."""
    return _free(node) if argument_of(node, "p") == 0 or argument_of(node, "train") is False else []


def _normalised(node: Node) -> Iterable[Axis]:
    inputs, outputs = shapes_in(node), shapes_out(node)
    for dim in range(len(inputs[0]) - len(argument_of(node, "normalized_shape"))):
        yield Axis((dim,) + (None,) * (len(inputs) - 1), (dim,) * len(outputs))


def _reduced(free: bool) -> Callable[[Node], Iterable[Axis]]:
    """Some dims are reduced, to a value that no order changes if ``free``."""

    def axes(node: Node) -> Iterable[Axis]:
        (shape, *others), n_outputs = shapes_in(node), len(shapes_out(node))
        gone, kept = _dims(node, "dim", len(shape)), 0
        for dim in range(0 if others else len(shape)):
            if dim not in gone:
                yield Axis((dim,), (kept,) * n_outputs)
            elif free:
                yield Axis((dim,), (None,) * n_outputs)
            kept += dim not in gone or bool(argument_of(node, "keepdim"))

    return axes


def _renamed(order: Callable[[Node, int], Sequence[int]]) -> Callable[[Node], Iterable[Axis]]:
    """The dims in another order: result dim n is input dim ``order[n]``."""

    def axes(node: Node) -> Iterable[Axis]:
        given = order(node, len(shapes_in(node)[0]))
        return (Axis((source,), (n,)) for n, source in enumerate(given))

    return axes


def _swapped(node: Node, ndim: int) -> list[int]:
    order = list(range(ndim))
    if ndim > 1:
        first, second = (
            (0, 1)
            if name_of(node) == "aten.t"
            else (argument_of(node, "dim0") % ndim, argument_of(node, "dim1") % ndim)
        )
        order[first], order[second] = order[second], order[first]
    return order


def _moved(node: Node, ndim: int) -> list[int]:
    source, target = (argument_of(node, name) % ndim for name in ("source", "destination"))
    order = [dim for dim in range(ndim) if dim != source]
    order.insert(target, source)
    return order


def _selected(node: Node) -> Iterable[Axis]:
    """One dim is gone."""
    shape, n_outputs = shapes_in(node)[0], len(shapes_out(node))
    gone = argument_of(node, "dim") % len(shape)
    for dim in set(range(len(shape))) - {gone}:
        yield Axis((dim,), (dim - (dim > gone),) * n_outputs)


def _stacked(node: Node) -> Iterable[Axis]:
    inputs = shapes_in(node)
    new = argument_of(node, "dim") % (len(inputs[0]) + 1)
    for dim in range(len(inputs[0])):
        yield Axis((dim,) * len(inputs), (dim + (dim >= new),))


def _linear(node: Node) -> Iterable[Axis]:
    inputs = shapes_in(node)
    bias, last = inputs[2:], len(inputs[0]) - 1
    for dim in range(last):
        yield Axis((dim, None, *(None for _ in bias)), (dim,))
    yield Axis((None, 0, *(0 for _ in bias)), (last,))
    yield Axis((last, 1, *(None for _ in bias)), (None,))


def _matmul(node: Node) -> Iterable[Axis]:
    (a, b), (result,) = shapes_in(node), shapes_out(node)
    if min(len(a), len(b)) < 2:
        return
    for dim, size in enumerate(result[:-2]):
        own = [dim - len(result) + len(shape) for shape in (a, b)]
        has = [d >= 0 and s[d] == size for d, s in zip(own, (a, b), strict=True)]
        yield Axis(tuple(d if h else None for d, h in zip(own, has, strict=True)), (dim,))
    yield Axis((len(a) - 2, None), (len(result) - 2,))
    yield Axis((None, len(b) - 1), (len(result) - 1,))
    yield Axis((len(a) - 1, len(b) - 2), (None,))


def _addmm(node: Node) -> Iterable[Axis]:
    """``bias + a @ b``; the bias broadcasts."""
    (bias, *_), (result,) = shapes_in(node), shapes_out(node)
    row = 0 if len(bias) == 2 and bias[0] == result[0] else None
    column = len(bias) - 1 if bias and bias[-1] == result[1] else None
    yield Axis((row, 0, None), (0,))
    yield Axis((column, None, 1), (1,))
    yield Axis((None, 1, 0), (None,))


def _einsum(node: Node) -> Iterable[Axis]:
    equation = str(node.args[0]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    if "." in equation or not arrow or any(len(set(o)) < len(o) for o in operands):
        return
    for letter in sorted(set(left) - {","}):
        found = [o.find(letter) for o in operands]
        yield Axis(
            tuple(None if d < 0 else d for d in found),
            (right.find(letter) if letter in right else None,),
        )


def _embedding(node: Node) -> Iterable[Axis]:
    _, indices = shapes_in(node)
    return (Axis((None, dim), (dim,)) for dim in range(len(indices)))


def _picked(node: Node) -> Iterable[Axis]:
    """``x.index_select(dim, index)``."""
    shape = shapes_in(node)[0]
    picked = argument_of(node, "dim") % len(shape)
    yield Axis((None, 0), (picked,))
    for dim in set(range(len(shape))) - {picked}:
        yield Axis((dim, None), (dim,))


def _indexed(node: Node) -> Iterable[Axis]:
    """``x[:, index]`` with one tensor of integers."""
    given, inputs = argument_of(node, "indices"), shapes_in(node)
    at = [n for n, index in enumerate(given) if index is not None]
    if len(at) != 1 or tensor_inputs(node)[1].meta["val"].dtype == torch.bool:
        return
    shape, index = inputs
    for dim in range(len(index)):
        yield Axis((None, dim), (at[0] + dim,))
    for dim in set(range(len(shape))) - {at[0]}:
        yield Axis((dim, None), (dim + (len(index) - 1) * (dim > at[0]),))


def filled(node: Node) -> Iterable[Axis]:
    return (Axis((), (dim,)) for dim in range(len(shapes_out(node)[0])))


def _each(names: str, family: Callable[[Node], Iterable[Axis]]) -> dict[str, Any]:
    return {f"aten.{name}": family for name in names.split()}


FAMILIES: dict[str, Callable[[Node], Iterable[Axis]]] = {
    # Those that are pointwise but not tagged so, and those that only broadcast.
    **_each("_to_copy to type_as clone alias detach contiguous lift_fresh_copy copy fill "
            "full_like zeros_like ones_like subtract multiply divide floor_divide rsub negative "
            "absolute hardswish log_sigmoid __and__ __or__ __xor__ complex polar real imag conj "
            "_conj masked_fill expand expand_as repeat", elementwise),
    **_each("view_as_complex view_as_real one_hot", _leading),
    **_each("softmax _softmax log_softmax _log_softmax", _free),
    **_each("cumsum cumprod logcumsumexp sort argsort topk slice split split_with_sizes chunk "
            "narrow gather cat concat concatenate glu repeat_interleave", _but("dim")),
    **_each("flip roll", _but("dims")),
    **_each("pad constant_pad_nd", _padded),
    **_each("tril triu", _last_two),
    **_each("dropout native_dropout", _inactive),
    **_each("layer_norm native_layer_norm rms_norm _fused_rms_norm", _normalised),
    **_each("sum mean amax amin any all logsumexp var std prod linalg_vector_norm norm nansum "
            "nanmean count_nonzero", _reduced(free=True)),
    **_each("max min", lambda node: _reduced(len(shapes_out(node)) == 1)(node)),
    **_each("argmax argmin median", _reduced(free=False)),
    **_each("permute", _renamed(lambda node, n: [d % n for d in argument_of(node, "dims")])),
    **_each("transpose t", _renamed(_swapped)),
    **_each("movedim", _renamed(_moved)),
    **_each("select unbind", _selected),
    **_each("stack", _stacked),
    **_each("linear", _linear),
    **_each("mm bmm matmul", _matmul),
    **_each("addmm", _addmm),
    **_each("einsum", _einsum),
    **_each("embedding", _embedding),
    **_each("index_select", _picked),
    **_each("index", _indexed),
    **_each("full zeros ones scalar_tensor", filled),
}  # fmt: skip
