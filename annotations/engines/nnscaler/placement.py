"""How a part of an nnscaler op was cut, and the devices of the other parts of its group.

Takes nnscaler's nodes, but imports none of it. A part's tensors say which part of the whole they
are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from annotations.errors import PartitionError
from annotations.rules import PartitionRule, SplitSite

_MADE_AT_RUN_TIME = "the group's name"  # in arguments, until the code is written


def sites(annotation: Any, inputs: Sequence[Any], rule: PartitionRule) -> list[SplitSite]:
    """The splits of a part with ``inputs`` that its op must know; without the ranks."""
    found: dict[str, SplitSite] = {}
    for dim, tensor, n in _dims(annotation, inputs):
        part, whole = tensor.shape[n], tensor.parent.shape[n]
        name = leading(dim)
        if part == whole or name in found or name not in rule.shard_aware:
            continue
        inner = math.prod(map(annotation.getlen, dim.identifiers)) // annotation.getlen(name)
        group = f"{_MADE_AT_RUN_TIME} {name}" if name in rule.communicates else ""
        index = tensor.indmap[n][0] // part
        found[name] = SplitSite(name, whole // inner, whole // part, group, index)
    return list(found.values())


def divisors(
    annotation: Any, outputs: Sequence[Any], cut: Iterable[SplitSite], rule: PartitionRule
) -> tuple[int, ...]:
    """The divisor of each result's gradient before the backward of a part with ``outputs``.

    Every part that computes the result whole gets the whole gradient, but its backward takes
    1 / parts of it (:class:`~annotations.rules.Communicates`).
    """
    shared = [
        site
        for site in cut
        if site.identifier in rule.communicates
        and not rule.communicates[site.identifier].whole_gradients
    ]
    found = []
    for shape, tensor in zip(annotation.outputs(), outputs, strict=True):
        has = {name for dim in shape.dims for name in dim.identifiers}
        whole = [site.parts for site in shared if site.identifier not in has]
        found.append(math.prod(whole) if getattr(tensor, "requires_grad", False) else 1)
    return tuple(found)


def leading(dim: Any) -> str:
    """The identifier that a cut of a dim cuts."""
    return next((name for name in dim.identifiers if name != "1"), "1")


def devices(node: Any, site: SplitSite, placed: Iterable[Any]) -> tuple[int, ...]:
    """The devices of the parts that differ from ``node`` only in their part of the split.

    If parts are replicated, the n-th copies of all parts are a group.

    Args:
        placed: all parts that have a device, of this op and others.
    Raises:
        PartitionError: the devices are not in increasing order, or some parts have more of them.
    """
    others = _part(node, site.identifier)[1]
    devices_of: dict[int, list[int]] = {index: [] for index in range(site.parts)}
    for other in _in_order(node, placed):
        index, rest = _part(other, site.identifier)
        if rest == others:
            devices_of[index].extend(d for d in other.device if d not in devices_of[index])
    copies = list(devices_of.values())
    mine = copies[site.index].index(node.device[0])
    if all(len(on) == len(copies[0]) for on in copies):
        ranks = tuple(on[mine] for on in copies)
        if list(ranks) == sorted(set(ranks)):
            return ranks
    raise PartitionError(
        f"{node.base}: the {site.parts} parts of {site.identifier!r} lie on devices {copies}; an "
        "op that communicates inside needs each part on as many devices, in increasing order"
    )


def check_order(node: Any, rule: PartitionRule, placed: Iterable[Any]) -> None:
    """Refuse parts on devices between which nnscaler's adapters would swap tensors.

    Its collectives take their ranks in increasing order, whatever order the parts are in. A part
    then gets the tensors of another part, but keeps its own parameters (sinks, slopes), and a
    shard-aware op still takes its part to be its own.

    Args:
        placed: all parts that have a device, of this op and others.
    Raises:
        PartitionError: parts along a cut are not on devices in increasing order.
    """
    on: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for other in _in_order(node, placed):
        start = {leading(d): t.indmap[n][0] for d, t, n in _dims(other.anno, other.inputs())}
        here = on.setdefault(tuple(start.items()), [])
        here.extend(device for device in other.device if device not in here)
    if len({len(devices_of_part) for devices_of_part in on.values()}) > 1:
        return  # autodist may leave some parts on more devices than others: these are no rows
    for name, _ in next(iter(on)):
        if name in rule.communicates:
            continue  # checked by :func:`devices`
        rows: dict[Any, list[tuple[int, list[int]]]] = {}
        for starts, devices_of_part in on.items():
            others = tuple((n, start) for n, start in starts if n != name)
            rows.setdefault(others, []).append((dict(starts)[name], devices_of_part))
        on_devices = [[on_part for _, on_part in sorted(row)] for _, row in sorted(rows.items())]
        if any(
            list(parts) != sorted(parts) for row in on_devices for parts in zip(*row, strict=True)
        ):
            raise PartitionError(
                f"the parts of {name!r} lie on devices {on_devices}, and nnscaler's adapters would "
                "swap their tensors",
                details=["expected: devices in increasing order along every cut of the op"],
                op=node.base,
            )


def _in_order(node: Any, placed: Iterable[Any]) -> list[Any]:
    """The parts of ``node``'s op in the order of the graph: nnscaler's adapters take the n-th
    copies of all parts together."""
    return sorted((other for other in placed if _twin(node, other)), key=lambda part: part.number)


def _twin(node: Any, other: Any) -> bool:
    """Whether two nodes are parts of one op, and so of the same results."""
    return other.base == node.base and all(
        a.parent is b.parent
        for a, b in zip(node.outputs(), other.outputs(), strict=False)
        if hasattr(a, "parent")
    )


def _part(node: Any, identifier: str) -> tuple[int, tuple[int, ...]]:
    """The index of a node's part of ``identifier``, and where the part starts in other dims."""
    index, others = 0, []
    for dim, tensor, n in _dims(node.anno, node.inputs()):
        start = tensor.indmap[n][0]
        if leading(dim) == identifier:
            index = start // tensor.shape[n]
        else:
            others.append(start)
    return index, tuple(others)


def _dims(annotation: Any, inputs: Sequence[Any]) -> Iterator[tuple[Any, Any, int]]:
    """The annotated dims of tensors: each with its tensor and its index there."""
    for shape, tensor in zip(annotation.inputs(), inputs, strict=True):
        if hasattr(tensor, "indmap") and not shape.ignore:
            for n, dim in enumerate(shape.dims):
                yield dim, tensor, n
