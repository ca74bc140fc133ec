"""Annotations of torch's products: matrices, convolutions and attention; see :mod:`.aten`."""

from __future__ import annotations

from torch.fx import Node

from ..capture.nodes import argument_of, tensor_inputs
from .aten_calls import (
    as_sizes,
    broadcast,
    name_of,
    names_of,
    shapes_in,
    shapes_out,
    written,
)


def linear(node: Node) -> str:
    """With a bias, a partial sum would have it once a rank."""
    return "* k+, n k+ -> * n" if len(tensor_inputs(node)) == 2 else "* k^, n k^, n -> * n"


def matmul(node: Node) -> str | None:
    """Also ``mm`` and ``bmm``; the leading dims broadcast."""
    (a, b), (result,) = shapes_in(node), shapes_out(node)
    if min(len(a), len(b)) < 2:
        return None
    names, batch = names_of(len(result) - 2), result[:-2]
    left, right = (broadcast(shape[:-2], names, batch) for shape in (a, b))
    return written([[*left, "m", "k+"], [*right, "k+", "n"]], [[*names, "m", "n"]])


def addmm(node: Node) -> str:
    """``bias + a @ b``; the bias broadcasts."""
    (bias, *_), (result,) = shapes_in(node), shapes_out(node)
    return f"{' '.join(broadcast(bias, 'mn', result)) or '()'}, m k^, k^ n -> m n"


def einsum(node: Node) -> str | None:
    """Its equation, where that names every dim once in each tensor."""
    left, arrow, right = str(node.args[0]).replace(" ", "").partition("->")
    operands = left.split(",")
    if "." in left or not arrow or any(len(set(o)) < len(o) for o in operands):
        return None
    marked = {letter: letter if letter in right else f"{letter}+" for letter in left}
    return written([[marked[letter] for letter in each] for each in operands], [right])


def convolution(node: Node) -> str:
    """Batch and, where there is one group of channels, channels; tokens need their neighbours."""
    (x, weight, *bias), (result,) = shapes_in(node), shapes_out(node)
    spatial = len(weight) - 2
    transposed = "transpose" in name_of(node) or argument_of(node, "transposed")
    c, n = "c^" if bias else "c+", "n"
    rows = [c, n] if transposed else [n, c]
    if argument_of(node, "groups") > 1:  # a call on some of them needs another number
        c, n = str(x[-spatial - 1]), str(result[-spatial - 1])
        rows = as_sizes(weight[:2])
    batch = ["b"] * (len(x) == len(weight))
    read = [
        [*batch, c, *as_sizes(x[-spatial:])],
        [*rows, *as_sizes(weight[2:])],
        *[[n]] * len(bias),
    ]
    return written(read, [[*batch, n, *as_sizes(result[-spatial:])]])


def attention(node: Node) -> str:
    """torch's ``scaled_dot_product_attention``: batch and heads. Rows need all keys; attention that
    may be cut on its sequence is the annotated ops'."""
    (q, k, v, *mask), (result,) = shapes_in(node), shapes_out(node)
    of_q, of_k = [], []
    for n, (a, b, c) in enumerate(zip(q[:-2], k[:-2], v[:-2], strict=True)):
        of_k.append(f"a{n}")
        if a == b == c:
            of_q.append(f"a{n}")
        elif b == c and a % b == 0 and n == len(q) - 3 and argument_of(node, "enable_gqa"):
            of_q.append(f"(a{n} {a // b})")
        else:  # nothing may be cut
            return written(map(as_sizes, (q, k, v, *mask)), [as_sizes(result)])
    read = [lead + as_sizes(s[-2:]) for lead, s in zip((of_q, of_k, of_k), (q, k, v), strict=True)]
    read += [broadcast(s[:-2], of_q, q[:-2]) + as_sizes(s[-2:]) for s in mask]
    return written(read, [of_q + as_sizes(result[-2:])])
