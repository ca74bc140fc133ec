"""Dropout that a cut does not change: drawn by an element's place in the whole tensor.

A captured dropout becomes an annotated op that may be cut on any dim. Which elements it drops
follows from a seed, from which of the graph's dropouts it is, and from the element's index. So any
plan drops the same ones, and the backward draws the forward's again.

Words of :mod:`annotations.philox`, for an element in row r (all dims but the last, flattened) and
column c (the last dim) of the whole tensor:

| | word 0 | word 1 | word 2 | word 3 |
|---|---|---|---|---|
| counter | r, low half | r, high half | c // 4 | copy of the model · 2^16 + number of the dropout |
| key | seed, low half | seed, high half | | |
| result | c % 4 = 0 | 1 | 2 | 3 |
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, Node

from annotations.library.declaration import register_op
from annotations.philox import LOW, WORDS, philox, threshold
from annotations.rules import PartitionRule, SplitSite, Told

from .nodes import argument_of

DROPOUTS = (torch.ops.aten.dropout.default, torch.ops.aten.native_dropout.default)

MAX_CUT_DIMS = 5  # later dims are not cut
DROPOUTS_OF_A_COPY = 2**16


def draw_seed(plan: DeviceMesh, copy: int) -> Tensor:
    """The seed of one forward, the same on all ranks of a copy: the first rank's is sent to all.

    Every rank draws from torch's default CPU generator, which ``torch.manual_seed`` sets and
    ``torch.get_rng_state`` saves.

    Returns:
        int64[2], a seed and the copy's number.
    """
    group = plan.get_group()
    pair = torch.stack([torch.randint(2**63 - 1, ()), torch.tensor(copy)]).to(plan.device_type)
    dist.broadcast(pair, src=dist.get_global_rank(group, 0), group=group)
    return pair


def dropped_by_place(graph: Graph) -> Node | None:
    """Replace the dropouts that drop in a captured graph; return the new input for the seed, if
    there are any."""
    seed = None
    number = 0
    for node in list(graph.nodes):
        if not is_active(node) or not node.args[0].meta["val"].ndim:
            continue
        x, p = node.args[:2]
        if seed is None:
            seed = _seed_input(graph, x)
        sizes = list(x.meta["val"].shape)
        with graph.inserting_before(node):
            new = graph.call_function(
                torch.ops.seqshard.dropout.default,
                (x, seed, p, number, sizes, *[0] * MAX_CUT_DIMS),
            )
        new.meta = {**node.meta, "val": x.meta["val"].new_empty(sizes)}
        _replace(graph, node, new)
        number += 1
    return seed


def is_active(node: Node) -> bool:
    """Whether ``node`` is a dropout that drops."""
    if node.target not in DROPOUTS:
        return False
    _, p, train = node.args
    return bool(p != 0 and train is not False)


def draws(node: Node) -> bool:
    """Whether ``node`` draws random numbers; an attention or a dropout that drops nothing does not,
    though torch says that such ops do."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        return bool(argument_of(node, "dropout_p"))
    return node.target not in DROPOUTS or is_active(node)


def _seed_input(graph: Graph, like: Node) -> Node:
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        seed = graph.placeholder("dropout_seed")
    seed.meta["val"] = like.meta["val"].new_empty((2,), dtype=torch.int64)
    return seed


def _replace(graph: Graph, node: Node, new: Node) -> None:
    """Replace a dropout. ``native_dropout`` also returns which elements it kept; only its backward
    reads these."""
    if node.target is torch.ops.aten.dropout.default:
        node.replace_all_uses_with(new)
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] == 0:
            user.replace_all_uses_with(new)
        if not user.users:
            graph.erase_node(user)
    if not node.users:
        graph.erase_node(node)


def _annotation(x: Tensor, **_: Any) -> str:
    dims = " ".join(f"d{n}" + ("" if n < MAX_CUT_DIMS else "^") for n in range(x.ndim))
    return f"{dims}, ? -> {dims}"


def _first(dim: int) -> Callable[[SplitSite], Mapping[str, int]]:
    def arguments(site: SplitSite) -> Mapping[str, int]:
        return {f"first_{dim}": min(site.index * -(-site.size // site.parts), site.size)}

    return arguments


def kept(
    seed: Tensor, p: float, number: int, sizes: Sequence[int], first: Sequence[int], part: Tensor
) -> Tensor:
    """bool, of the shape and on the device of ``part``: which of its elements are kept.

    Args:
        seed: int64[2], see :func:`draw_seed`.
        number: which of the program's dropouts it is.
        sizes: shape of the whole tensor. first: where ``part`` begins in it.
    """
    device, seed = part.device, seed.to(part.device)
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for size, start, count in zip(sizes[:-1], first, part.shape[:-1], strict=False):
        rows = rows.unsqueeze(-1) * size + torch.arange(start, start + count, device=device)
    begin, count = first[len(sizes) - 1] if len(sizes) <= len(first) else 0, part.shape[-1]
    columns = torch.arange(begin // WORDS, -(-(begin + count) // WORDS), device=device)
    rows = rows.unsqueeze(-1)
    words = philox(
        (rows & LOW, rows >> 32, columns, seed[1] * DROPOUTS_OF_A_COPY + number),
        (seed[0] & LOW, (seed[0] >> 32) & LOW),
    )
    by_column = torch.stack([word >= threshold(p) for word in words], dim=-1).flatten(-2)
    return by_column.narrow(-1, begin % WORDS, count)


def _backward(
    grad: Tensor,
    x: Tensor,
    seed: Tensor,
    p: float,
    number: int,
    sizes: Sequence[int],
    *first_and_results: Any,
) -> tuple[Tensor]:
    return (_dropped(grad, seed, p, number, sizes, first_and_results[:MAX_CUT_DIMS]),)


def _dropped(
    x: Tensor, seed: Tensor, p: float, number: int, sizes: Sequence[int], first: Sequence[int]
) -> Tensor:
    if p >= 1:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    keep = kept(seed, p, number, sizes, first, x)
    return torch.where(keep, x / (1 - p), 0.0).contiguous()


@register_op(
    _annotation,
    name="seqshard::dropout",
    rule=PartitionRule(told={f"d{n}": Told(_first(n)) for n in range(MAX_CUT_DIMS)}),
    differentiable=("x",),
    backward=_backward,
)
def dropout(
    x: Tensor,
    seed: Tensor,
    p: float,
    number: int,
    sizes: Sequence[int],
    first_0: int,
    first_1: int,
    first_2: int,
    first_3: int,
    first_4: int,
) -> Tensor:
    """``x`` with a share ``p`` of its elements 0 and the others divided by 1 - p.

    Args:
        x: [d0, d1, ...], a part of the whole tensor.
        seed: int64[2], see :func:`draw_seed`.
        p: between 0 and 1.
        number: which of the program's dropouts it is.
        sizes: shape of the whole tensor. first_0, ...: where the part begins in each dim.
    """
    return _dropped(x, seed, p, number, sizes, (first_0, first_1, first_2, first_3, first_4))
