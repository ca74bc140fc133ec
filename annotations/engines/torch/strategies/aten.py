"""Annotations of torch's own ops that may run on local tensors as they are.

DTensor decides for most ops (:mod:`.dtensor_probe`), but its rules for these cannot be used. Its
rule for linear flattens the leading dims, which it refuses for uneven shards. Its rules for
convolutions accept splits that then fail. For attention it has one rule per backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from .aten_axes import argument_of, name_of

aten = torch.ops.aten

# With a bias, a partial sum would have it once a rank.
LINEAR = {2: "* k+, n k+ -> * n", 3: "* k^, n k^, n -> * n"}


def annotation_of(node: Node, inputs: Sequence[Node]) -> str | None:
    """The annotation of a call, or None where there is none here."""
    known = ANNOTATIONS.get(node.target)
    return None if known is None else known(node, inputs)


def _linear(node: Node, inputs: Sequence[Node]) -> str:
    return LINEAR[len(inputs)]


def _convolution(node: Node, inputs: Sequence[Node]) -> str:
    """Batch and, where there is one group of channels, channels; tokens need their neighbours."""
    x, weight = (each.meta["val"] for each in inputs[:2])
    spatial = weight.ndim - 2
    places, sizes = (" ".join(f"{c}{n}^" for n in range(spatial)) for c in "lk")
    results = " ".join(map(str, node.meta["val"].shape[-spatial:]))
    batch = "b " if x.ndim == weight.ndim else ""
    bias, groups = len(inputs) == 3, argument_of(node, "groups")
    transposed = "transpose" in name_of(node) or argument_of(node, "transposed")
    c, n = "c^" if bias else "c+", "n"
    rows = (c, n) if transposed else (n, c)
    if groups > 1:  # a call of some of them would have to be told how many
        c, n = "c^", str(node.meta["val"].shape[-spatial - 1])
        rows = str(weight.shape[0]), str(weight.shape[1])
    added = f", {n}" if bias else ""
    return f"{batch}{c} {places}, {' '.join(rows)} {sizes}{added} -> {batch}{n} {results}"


def _attention(node: Node, inputs: Sequence[Node]) -> str:
    """torch's ``scaled_dot_product_attention``: batch and heads. Rows need all keys; attention that
    may be cut on its sequence is the annotated ops'."""
    q, k, v, *mask = (tuple(each.meta["val"].shape) for each in inputs)
    words = []
    for n, (a, b, c) in enumerate(zip(q[:-2], k[:-2], v[:-2], strict=True)):
        if a == b == c:
            words.append((f"a{n}", f"a{n}"))
        elif b == c and a % b == 0 and n == len(q) - 3 and argument_of(node, "enable_gqa"):
            words.append((f"(a{n} {a // b})", f"a{n}"))
        else:
            return _frozen(inputs, node)
    of_q, of_k = (" ".join(each) for each in zip(*words, strict=True)) if words else ("", "")
    shapes = [f"{of_q} l^ d^", f"{of_k} s^ d^", f"{of_k} s^ e^"]
    for shape in mask:
        own = shape[:-2] and [w for w, _ in words][-len(shape[:-2]) :]
        lead = ["1" if n == 1 else w for n, w in zip(shape[:-2], own, strict=True)]
        shapes.append(" ".join([*lead, *map(str, shape[-2:])]))
    return f"{', '.join(shapes)} -> {of_q} l^ e^"


def _frozen(inputs: Sequence[Node], node: Node) -> str:
    """Nothing may be cut."""
    shapes = [tuple(each.meta["val"].shape) for each in (*inputs, node)]
    *given, result = (" ".join(map(str, shape)) or "1" for shape in shapes)
    return f"{', '.join(given)} -> {result}"


ANNOTATIONS: dict[Any, Callable[[Node, Sequence[Node]], str]] = {
    aten.linear.default: _linear,
    aten.scaled_dot_product_attention.default: _attention,
    **dict.fromkeys(
        (
            *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
            *(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding),
            *(aten.conv_transpose1d.default, aten.conv_transpose2d.input),
            *(aten.conv_transpose3d.input, aten.convolution.default),
        ),
        _convolution,
    ),
}
