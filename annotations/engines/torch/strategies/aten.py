"""Annotations of torch's own ops: for each op a function from a call to the annotation's text.

    linear    * k+, n k+ -> * n              conv1d    b c+ 16, n c+ 3 -> b n 14
    softmax   a0 a1^ -> a0 a1^               cumsum    a0 16 -> a0 16

A dim has a name if the op takes its positions in any order, even if it must not be cut (``^``). A
dim whose order matters is written as its size. So an annotation says both how an op may be cut and
which order of tokens passes through it. Nothing is assumed about an op that is not here: that
DTensor cuts an op without communication does not show that it takes tokens in any order.

Two things have no annotation. Views keep the order of all elements, whatever becomes of the dims:
:mod:`..permute.token_axes` follows these by their shapes. Whether DTensor can run an op, and with
which placements, is for DTensor to say (:mod:`.dtensor_probe`); only the ops of ``LOCAL`` are cut
as their annotations say, on local tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch.fx import Node

from annotations.binding import BoundAnnotation, bind
from annotations.grammar import Annotation
from annotations.registry import record_of
from annotations.solving import TensorShape

from ..capture.nodes import argument_of, arguments_of, shapes_in, shapes_out, tensor_inputs

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
    """The annotation of an op, bound to a call's shapes; for an annotated op, the first of its
    alternatives. None if nothing is known about the op."""
    record = record_of(node.target)
    if record is not None:
        return record.bind(arguments_of(node, record))
    tags = getattr(node.target, "tags", ())
    pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    describe = ANNOTATIONS.get(name_of(node), _elementwise if pointwise else None)
    text = None if describe is None else describe(node)
    if text is None:
        return None
    return _bound(text, str(node.target), tuple(shapes_in(node)), tuple(shapes_out(node)))


@functools.lru_cache(maxsize=4096)
def _bound(
    text: str, op: str, inputs: tuple[TensorShape, ...], outputs: tuple[TensorShape, ...]
) -> BoundAnnotation:
    annotation = Annotation.parse(text)
    named = {name for shape in annotation.inputs for dim in shape.dims for name in dim.named}
    sizes = {  # of dims that no input has
        name: size
        for shape, result in zip(annotation.outputs, outputs, strict=True)
        for dim, size in zip(shape.dims, result, strict=False)
        for name in dim.named
        if name not in named
    }
    return bind(annotation, op, [f"input {n}" for n in range(len(inputs))], inputs, sizes)


def name_of(node: Node) -> str:
    """``aten.sum`` for ``aten.sum.dim_IntList``."""
    return str(node.target).rsplit(".", 1)[0]


def _text(inputs: Iterable[Sequence[str]], outputs: Iterable[Sequence[str]]) -> str:
    """The annotation of tensors with these dims."""
    sides = (", ".join(" ".join(dims) or "()" for dims in side) for side in (inputs, outputs))
    return " -> ".join(sides)


def _sizes(shape: Iterable[int]) -> list[str]:
    return [str(size) for size in shape]


def _names(shape: TensorShape) -> list[str]:
    return [f"a{n}" for n in range(len(shape))]


def _broadcast(shape: TensorShape, names: Sequence[str], result: TensorShape) -> list[str]:
    """The dims of a tensor that broadcasts to ``result``, which has these names."""
    last = len(result) - len(shape)
    pairs = zip(shape, names[last:], result[last:], strict=True)
    return [name if size == whole else str(size) for size, name, whole in pairs]


def _elementwise(node: Node) -> str:
    inputs, (result, *others) = shapes_in(node), shapes_out(node)
    names = _names(result)
    for dim, whole in enumerate(result):
        sizes = {s[dim - len(result)] for s in inputs if len(s) >= len(result) - dim}
        if not sizes <= {1, whole}:  # repeat lays out copies
            names[dim] = str(whole)
    return _text([_broadcast(s, names, result) for s in inputs], [names, *(names for _ in others)])


def _all_but(apart: Callable[[Node], Collection[int]], mark: str | None = None) -> Describe:
    """An op that treats positions one by one in all dims except ``apart``, which results may lack.

    Args:
        mark: the sign after the names of ``apart`` dims, if their order does not matter either. If
            an op has several results, one of them is an index, for which it does matter.
    """

    def text(node: Node) -> str | None:
        inputs, outputs = shapes_in(node), shapes_out(node)
        first, special = inputs[0], apart(node)
        if mark is not None and len(inputs) > 1:
            return None
        names = _names(first)
        for n, size in enumerate(first):
            if n in special and mark is not None and len(outputs) == 1:
                names[n] += mark
            elif n in special or any(s[n:][:1] != (size,) or len(s) != len(first) for s in inputs):
                names[n] = ""  # written as its size

        def dims(shape: TensorShape) -> list[str]:
            if len(shape) == len(first):
                sizes = zip(shape, names, first, strict=True)
                return [name if name and n == whole else str(n) for n, name, whole in sizes]
            if len(shape) + len(special) == len(first):
                return [name or str(first[n]) for n, name in enumerate(names) if n not in special]
            return _sizes(shape)

        return _text(map(dims, inputs), map(dims, outputs))

    return text


def _given(argument: str) -> Callable[[Node], set[int]]:
    """The dims of the first input that an argument names; all where it names none."""

    def dims(node: Node) -> set[int]:
        given, ndim = argument_of(node, argument), len(shapes_in(node)[0])
        named = [given] if isinstance(given, int) else given
        return {dim % ndim for dim in named} if named and ndim else set(range(ndim))

    return dims


def _last(count: Callable[[Node], int]) -> Callable[[Node], Collection[int]]:
    def dims(node: Node) -> range:
        ndim = len(shapes_in(node)[0])
        return range(ndim - count(node), ndim)

    return dims


def _inactive(node: Node) -> str | None:
    """Dropout that drops nothing, as capture ensures."""
    off = argument_of(node, "p") == 0 or argument_of(node, "train") is False
    return _all_but(lambda node: ())(node) if off else None


def _normalised(node: Node) -> str:
    (first, *others), last = shapes_in(node), len(argument_of(node, "normalized_shape"))
    read, *made = (["*", *_sizes(s[-last:])] for s in (first, *shapes_out(node)))
    return _text([read, *map(_sizes, others)], made)


def _renamed(node: Node) -> str:
    """The dims in another order, as found by a call in which dim n has size n."""
    names = _names(shapes_in(node)[0])
    probe = torch.empty(tuple(range(len(names))), device="meta")
    order = node.target(probe, *node.args[1:], **node.kwargs).shape  # type: ignore[operator]
    return _text([names], [[names[n] for n in order]])


def _stacked(node: Node) -> str:
    inputs = shapes_in(node)
    names, new = _names(inputs[0]), argument_of(node, "dim") % (len(inputs[0]) + 1)
    return _text([names] * len(inputs), [[*names[:new], str(len(inputs)), *names[new:]]])


def _matmul(node: Node) -> str | None:
    (a, b), (result,) = shapes_in(node), shapes_out(node)
    if min(len(a), len(b)) < 2:
        return None
    batch = result[:-2]
    names = _names(batch)
    left, right = (_broadcast(shape[:-2], names, batch) for shape in (a, b))
    return _text([[*left, "m", "k+"], [*right, "k+", "n"]], [[*names, "m", "n"]])


def _addmm(node: Node) -> str:
    (bias, *_), (result,) = shapes_in(node), shapes_out(node)
    return f"{' '.join(_broadcast(bias, 'mn', result)) or '()'}, m k^, k^ n -> m n"


def _einsum(node: Node) -> str | None:
    left, arrow, right = str(node.args[0]).replace(" ", "").partition("->")
    operands = left.split(",")
    if "." in left or not arrow or any(len(set(o)) < len(o) for o in operands):
        return None
    marked = {letter: letter if letter in right else f"{letter}+" for letter in left}
    return _text([[marked[letter] for letter in each] for each in operands], [right])


def _indexed(node: Node) -> str | None:
    """``x.index_select(dim, index)``, or ``x[:, index]`` with one tensor of integers."""
    (shape, index, *more), indices = shapes_in(node), argument_of(node, "indices")
    if more or tensor_inputs(node)[1].meta["val"].dtype == torch.bool:
        return None
    if indices is None:
        at = argument_of(node, "dim") % len(shape)
    else:
        at = next(n for n, each in enumerate(indices) if each is not None)
    names, new = _names(shape), [f"i{n}" for n in range(len(index))]
    before, after = names[:at], names[at + 1 :]
    return _text([[*before, str(shape[at]), *after], new], [[*before, *new, *after]])


def _convolution(node: Node) -> str:
    """Names batch and, with one group of channels, channels; tokens need their neighbours."""
    (x, weight, *bias), (result,) = shapes_in(node), shapes_out(node)
    spatial = len(weight) - 2
    transposed = "transpose" in name_of(node) or argument_of(node, "transposed")
    c, n = "c^" if bias else "c+", "n"
    rows = [c, n] if transposed else [n, c]
    if argument_of(node, "groups") > 1:  # a call on some channels needs another number
        c, n = str(x[-spatial - 1]), str(result[-spatial - 1])
        rows = _sizes(weight[:2])
    batch = ["b"] * (len(x) == len(weight))
    read = [[*batch, c, *_sizes(x[-spatial:])], [*rows, *_sizes(weight[2:])], *[[n]] * len(bias)]
    return _text(read, [[*batch, n, *_sizes(result[-spatial:])]])


def _attention(node: Node) -> str:
    """torch's ``scaled_dot_product_attention``: names batch and heads. Rows need all keys; only the
    attention of annotated ops may be cut on its sequence."""
    (q, k, v, *mask), (result,) = shapes_in(node), shapes_out(node)
    of_q, of_k = [], []
    for n, (a, b, c) in enumerate(zip(q[:-2], k[:-2], v[:-2], strict=True)):
        of_k.append(f"a{n}")
        if a == b == c:
            of_q.append(f"a{n}")
        elif b == c and a % b == 0 and n == len(q) - 3 and argument_of(node, "enable_gqa"):
            of_q.append(f"(a{n} {a // b})")
        else:  # nothing may be cut
            return _text(map(_sizes, (q, k, v, *mask)), [_sizes(result)])
    read = [lead + _sizes(s[-2:]) for lead, s in zip((of_q, of_k, of_k), (q, k, v), strict=True)]
    read += [_broadcast(s[:-2], of_q, q[:-2]) + _sizes(s[-2:]) for s in mask]
    return _text(read, [of_q + _sizes(result[-2:])])


def _each(names: str, describe: Describe) -> dict[str, Describe]:
    return {f"aten.{name}": describe for name in names.split()}


ANNOTATIONS: dict[str, Describe] = {
    # Those that are pointwise but not tagged so, and those that only broadcast.
    **_each("_to_copy to type_as clone alias detach contiguous lift_fresh_copy copy fill "
            "full_like zeros_like ones_like subtract multiply divide floor_divide rsub negative "
            "absolute hardswish log_sigmoid __and__ __or__ __xor__ complex polar real imag conj "
            "_conj masked_fill expand expand_as repeat", _elementwise),
    **_each("full zeros ones scalar_tensor", lambda node: _text([], map(_names, shapes_out(node)))),
    **_each("dropout native_dropout", _inactive),
    **_each("softmax _softmax log_softmax _log_softmax", _all_but(_given("dim"), "^")),
    **_each("cumsum cumprod logcumsumexp sort argsort topk slice split split_with_sizes chunk "
            "narrow gather cat concat concatenate glu repeat_interleave select unbind "
            "argmax argmin median", _all_but(_given("dim"))),
    **_each("sum nansum count_nonzero", _all_but(_given("dim"), "+")),
    **_each("mean amax amin any all logsumexp var std prod linalg_vector_norm norm nanmean max min",
            _all_but(_given("dim"), "^")),
    **_each("flip roll", _all_but(_given("dims"))),
    **_each("pad constant_pad_nd",
            _all_but(_last(lambda node: len(argument_of(node, "pad")) // 2))),
    **_each("tril triu", _all_but(_last(lambda node: 2))),
    **_each("view_as_real one_hot", lambda node: f"* -> * {shapes_out(node)[0][-1]}"),
    **_each("view_as_complex", lambda node: "* 2 -> *"),
    **_each("layer_norm native_layer_norm rms_norm _fused_rms_norm", _normalised),
    **_each("permute transpose t movedim", _renamed),
    **_each("stack", _stacked),
    # With a bias, a partial sum would add it once for each rank.
    **_each("linear", lambda node: "* k^, n k^, n -> * n" if len(tensor_inputs(node)) > 2
            else "* k+, n k+ -> * n"),
    **_each("mm bmm matmul", _matmul),
    **_each("addmm", _addmm),
    **_each("einsum", _einsum),
    **_each("embedding", lambda node: "{0} {1}, * -> * {1}".format(*shapes_in(node)[0])),
    **_each("index_select index", _indexed),
    **_each("scaled_dot_product_attention", _attention),
    **_each("convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
            _convolution),
}  # fmt: skip
