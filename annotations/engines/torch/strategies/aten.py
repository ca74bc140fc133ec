"""The dims of torch's own ops, in the annotation language: a function from a call to its text.

    linear    * k+, n k+ -> * n              conv1d    b c+ 16, n c+ 3 -> b n 14
    softmax   a0 a1^ -> a0 a1^               cumsum    a0 16 -> a0 16

A name is a dim of which the op takes positions in any order, also one that is not to be cut
(``^``). Where the order matters, a dim is written as its size. So an annotation says both how an op
may be cut and which order of tokens passes through it. Of an op that is not here nothing is
believed: that DTensor cuts an op without communication does not show that any order will do.

Two things have no annotation. Views keep the order of all elements, whatever becomes of the dims:
:mod:`..permute.token_axes` follows these by their shapes. Whether DTensor can run an op, and with
which placements, is DTensor's to say (:mod:`.dtensor_probe`); only the ops of ``LOCAL`` are cut as
their annotations say, on local tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

import torch
from torch.fx import Node

from annotations.binding import BoundAnnotation, bind
from annotations.grammar import Annotation
from annotations.registry import record_of
from annotations.solving import TensorShape

from ..capture.nodes import argument_of, arguments_of, tensor_inputs
from . import aten_products as products
from .aten_calls import (
    as_sizes,
    broadcast,
    name_of,
    named_dims,
    names_of,
    shapes_in,
    shapes_out,
    written,
)

Describe = Callable[[Node], str | None]

# DTensor's rules for these cannot be used. That for linear flattens the leading dims, which it
# refuses for uneven shards. Those for convolutions accept splits that then fail. For attention it
# has one rule per backend.
LOCAL = {
    *("aten.linear", "aten.scaled_dot_product_attention", "aten.convolution"),
    *("aten.conv1d", "aten.conv2d", "aten.conv3d"),
    *("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d"),
}


def bound_of(node: Node) -> BoundAnnotation | None:
    """The annotation of an op with a call's shapes, of an annotated op its first alternative; None
    if nothing is known of the op."""
    record = record_of(node.target)
    if record is not None:
        return record.bind(arguments_of(node, record))
    text = annotation_of(node)
    if text is None:
        return None
    return _bound(text, str(node.target), tuple(shapes_in(node)), tuple(shapes_out(node)))


@functools.lru_cache(maxsize=4096)
def _bound(
    text: str, op: str, inputs: tuple[TensorShape, ...], outputs: tuple[TensorShape, ...]
) -> BoundAnnotation:
    """Results also say sizes: those of dims that no input has."""
    annotation = Annotation.parse(text)
    named = {name for shape in annotation.inputs for dim in shape.dims for name in dim.named}
    made = {
        name: size
        for shape, sizes in zip(annotation.outputs, outputs, strict=True)
        for dim, size in zip(shape.dims, sizes, strict=False)
        for name in dim.named
        if name not in named
    }
    return bind(annotation, op, [f"input {n}" for n in range(len(inputs))], inputs, made)


def annotation_of(node: Node) -> str | None:
    """The annotation of a call of one of torch's ops, None if nothing is known of it."""
    tags = getattr(node.target, "tags", ())
    pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    describe = ANNOTATIONS.get(name_of(node), _elementwise if pointwise else None)
    return None if describe is None else describe(node)


def _elementwise(node: Node) -> str:
    inputs, results = shapes_in(node), shapes_out(node)
    names = names_of(len(results[0]))
    for dim, whole in enumerate(results[0]):
        sizes = {s[dim - len(results[0])] for s in inputs if len(s) >= len(results[0]) - dim}
        if not sizes <= {1, whole}:  # repeat lays out copies
            names[dim] = str(whole)
    return written([broadcast(s, names, results[0]) for s in inputs], [names] * len(results))


def _same_dims(node: Node, but: Collection[int] = (), uncut: Collection[int] = ()) -> str:
    """All tensors go along one by one, except in the dims ``but``; ``uncut`` are not to be cut."""
    inputs, outputs = shapes_in(node), shapes_out(node)
    free = [
        dim not in but and all(len(s) == len(inputs[0]) and s[dim] == size for s in inputs)
        for dim, size in enumerate(inputs[0])
    ]
    names = [f"a{n}^" if n in uncut else f"a{n}" for n in range(len(free))]

    def dims(shape: TensorShape) -> list[str]:
        if len(shape) != len(free):
            return as_sizes(shape)
        return [name if ok else str(n) for n, name, ok in zip(shape, names, free, strict=True)]

    return written(map(dims, inputs), map(dims, outputs))


def _but(argument: str) -> Describe:
    """Order matters in the dims that ``argument`` names."""
    return lambda node: _same_dims(node, named_dims(node, argument))


def _padded(node: Node) -> str:
    ndim = len(shapes_in(node)[0])
    return _same_dims(node, range(ndim - len(argument_of(node, "pad")) // 2, ndim))


def _last_two(node: Node) -> str:
    ndim = len(shapes_in(node)[0])
    return _same_dims(node, range(ndim - 2, ndim))


def _inactive(node: Node) -> str | None:
    """Dropout that drops nothing, as capture has seen to."""
    off = argument_of(node, "p") == 0 or argument_of(node, "train") is False
    return _same_dims(node) if off else None


def _leading(node: Node, count: int) -> str:
    """The first dims of the first input are kept as they are."""
    (first, *others), outputs = shapes_in(node), shapes_out(node)
    names = names_of(count)
    inputs = [names + as_sizes(first[count:]), *map(as_sizes, others)]
    return written(inputs, [names + as_sizes(shape[count:]) for shape in outputs])


def _with_inner(node: Node) -> str:
    """The last dim is added or taken away, as of complex numbers."""
    return _leading(node, min(len(shapes_in(node)[0]), len(shapes_out(node)[0])))


def _normalised(node: Node) -> str:
    return _leading(node, len(shapes_in(node)[0]) - len(argument_of(node, "normalized_shape")))


def _reduced(mark: str | None) -> Describe:
    """Some dims are reduced: the mark of their names, None if the result is an index into them."""

    def text(node: Node) -> str | None:
        (shape, *others), n_outputs = shapes_in(node), len(shapes_out(node))
        if others:
            return None
        gone, keepdim = named_dims(node, "dim"), bool(argument_of(node, "keepdim"))
        plain = mark is None or n_outputs > 1
        marked = as_sizes(shape) if plain else [f"{name}{mark}" for name in names_of(len(shape))]
        dims = [marked[n] if n in gone else f"a{n}" for n in range(len(shape))]
        kept = [
            "1" if n in gone else name for n, name in enumerate(dims) if keepdim or n not in gone
        ]
        return written([dims], [kept] * n_outputs)

    return text


def _renamed(order: Callable[[Node, int], Sequence[int]]) -> Describe:
    """The dims in another order: result dim n is input dim ``order[n]``."""

    def text(node: Node) -> str:
        names = names_of(len(shapes_in(node)[0]))
        return written([names], [[names[dim] for dim in order(node, len(names))]])

    return text


def _permuted(node: Node, ndim: int) -> list[int]:
    return [dim % ndim for dim in argument_of(node, "dims")]


def _swapped(node: Node, ndim: int) -> list[int]:
    order = list(range(ndim))
    if ndim > 1:
        a, b = (argument_of(node, name) for name in ("dim0", "dim1"))
        a, b = (0, 1) if a is None else (a % ndim, b % ndim)
        order[a], order[b] = order[b], order[a]
    return order


def _moved(node: Node, ndim: int) -> list[int]:
    source, target = (argument_of(node, name) % ndim for name in ("source", "destination"))
    order = [dim for dim in range(ndim) if dim != source]
    order.insert(target, source)
    return order


def _selected(node: Node) -> str:
    """One dim is gone."""
    (shape,), n_outputs = shapes_in(node), len(shapes_out(node))
    names, gone = names_of(len(shape)), argument_of(node, "dim") % len(shape)
    names[gone] = str(shape[gone])
    return written([names], [names[:gone] + names[gone + 1 :]] * n_outputs)


def _stacked(node: Node) -> str:
    inputs = shapes_in(node)
    names, new = names_of(len(inputs[0])), argument_of(node, "dim") % (len(inputs[0]) + 1)
    return written([names] * len(inputs), [[*names[:new], str(len(inputs)), *names[new:]]])


def _embedding(node: Node) -> str:
    table, indices = shapes_in(node)
    names = names_of(len(indices))
    return written([as_sizes(table), names], [[*names, str(table[1])]])


def _picked(node: Node) -> str:
    """``x.index_select(dim, index)``."""
    shape, _ = shapes_in(node)
    return _indexed_at(shape, argument_of(node, "dim") % len(shape), ["i"])


def _indexed(node: Node) -> str | None:
    """``x[:, index]`` with one tensor of integers."""
    at = [n for n, index in enumerate(argument_of(node, "indices")) if index is not None]
    if len(at) != 1 or tensor_inputs(node)[1].meta["val"].dtype == torch.bool:
        return None
    shape, index = shapes_in(node)
    return _indexed_at(shape, at[0], [f"i{n}" for n in range(len(index))])


def _indexed_at(shape: TensorShape, dim: int, index: list[str]) -> str:
    names = names_of(len(shape))
    read = [*names[:dim], str(shape[dim]), *names[dim + 1 :]]
    return written([read, index], [names[:dim] + index + names[dim + 1 :]])


def _filled(node: Node) -> str:
    return written([], [names_of(len(shapes_out(node)[0]))])


def _each(names: str, describe: Describe) -> dict[str, Describe]:
    return {f"aten.{name}": describe for name in names.split()}


ANNOTATIONS: dict[str, Describe] = {
    # Those that are pointwise but not tagged so, and those that only broadcast.
    **_each("_to_copy to type_as clone alias detach contiguous lift_fresh_copy copy fill "
            "full_like zeros_like ones_like subtract multiply divide floor_divide rsub negative "
            "absolute hardswish log_sigmoid __and__ __or__ __xor__ complex polar real imag conj "
            "_conj masked_fill expand expand_as repeat", _elementwise),
    **_each("view_as_complex view_as_real one_hot", _with_inner),
    **_each("softmax _softmax log_softmax _log_softmax",
            lambda node: _same_dims(node, uncut=named_dims(node, "dim"))),
    **_each("cumsum cumprod logcumsumexp sort argsort topk slice split split_with_sizes chunk "
            "narrow gather cat concat concatenate glu repeat_interleave", _but("dim")),
    **_each("flip roll", _but("dims")),
    **_each("pad constant_pad_nd", _padded),
    **_each("tril triu", _last_two),
    **_each("dropout native_dropout", _inactive),
    **_each("layer_norm native_layer_norm rms_norm _fused_rms_norm", _normalised),
    **_each("sum nansum count_nonzero", _reduced("+")),
    **_each("mean amax amin any all logsumexp var std prod linalg_vector_norm norm nanmean max min",
            _reduced("^")),
    **_each("argmax argmin median", _reduced(None)),
    **_each("permute", _renamed(_permuted)),
    **_each("transpose t", _renamed(_swapped)),
    **_each("movedim", _renamed(_moved)),
    **_each("select unbind", _selected),
    **_each("stack", _stacked),
    **_each("linear", products.linear),
    **_each("mm bmm matmul", products.matmul),
    **_each("addmm", products.addmm),
    **_each("einsum", products.einsum),
    **_each("embedding", _embedding),
    **_each("index_select", _picked),
    **_each("index", _indexed),
    **_each("full zeros ones scalar_tensor", _filled),
    **_each("scaled_dot_product_attention", products.attention),
    **_each("convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
            products.convolution),
}  # fmt: skip
