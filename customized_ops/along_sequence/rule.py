"""What engines need to know about an op along a sequence: how it is cut on ``l``, in which token
orders it can run, and how its public function is called on a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from annotations.codegen.public_call import PublicCall, without_data
from annotations.registry import OpRecord
from annotations.rules import (
    Arguments,
    Communicates,
    Cost,
    Follow,
    Order,
    Orders,
    PartitionRule,
    SplitSite,
)

from ..ring_attention.core.layout import Layout
from ..ring_attention.op.tokens.call_layouts import by_lengths, layout_when_cut
from ..ring_attention.op.tokens.lengths import has_data, on_host
from ..ring_attention.op.tokens.sequence_order import layout_of_order
from ..ring_attention.public_calls import layout_code, one_document, refuse_layouts, with_fake_group
from .segments import Segments, segments_of

CONTIGUOUS = "contiguous"  # only the name, so that one graph can serve any even total


def sequence_rule(
    cost: Cost,
    flops: Callable[..., float] | None,
    repeatable: Sequence[str] = (),
    saves_states: bool = False,
) -> PartitionRule:
    """The rule of an op whose tokens are ``l`` and that takes ``cu_seqlens``, ``layout`` and
    ``group``. ``cost`` is called with the layout of the cut as ``layout``. ``saves_states`` says
    whether the results hold something for each part of a document."""

    def shard(site: SplitSite) -> dict[str, str]:
        even = site.size % site.parts == 0
        layout = CONTIGUOUS if even else Layout.contiguous(site.size, site.parts).spec
        return {"group": site.group, "layout": layout}

    def cut(site: SplitSite, given: Arguments) -> dict[str, str]:
        spec = given["layout"]
        if not spec:
            return {}
        return {"layout": spec if by_lengths(spec) else _layout_at(site, given).spec}

    return PartitionRule(
        communicates={"l": Communicates(shard, cost)},
        flops=flops,
        orders={"l": Orders(lambda *_: None, _named, cut, _follow)},
        repeatable=tuple(repeatable),
        varies=lambda given: saves_states and by_lengths(given["layout"]),
    )


def segments_when_cut(site: SplitSite, given: Arguments) -> Segments:
    """The segments of a call that an engine cuts; assumes one document if lengths are unknown."""
    layout, lengths = _layout_at(site, given), given.get("cu_seqlens")
    if lengths is None or not has_data(lengths):
        return segments_of(layout, np.array([0, layout.total]))
    return segments_of(layout, on_host(lengths))


def _layout_at(site: SplitSite, given: Arguments) -> Layout:
    return layout_when_cut(given["layout"], site.size, site.parts, given.get("cu_seqlens"))


def _named(given: Arguments, order: Order) -> dict[str, str] | None:
    """The arguments that tell the op its order of tokens."""
    if given["group"] or given["layout"]:
        return None
    return {"layout": layout_of_order(order.tokens.tobytes()).spec}


def _follow(name: str, given: Arguments) -> Follow | str:
    """How a call runs on tokens that a shuffle has reordered, or why it cannot."""
    if by_lengths(name) and given.get("cu_seqlens") is None:
        return "only a call over packed documents (cu_seqlens) takes that order"
    own = [argument for argument in ("group", "layout") if given.get(argument)]
    if own:
        return f"the call is given a {own[0]} of its own"
    return Follow({"layout": name}, ("cu_seqlens",) if by_lengths(name) else ())


def public_call(
    function: Callable[..., Any],
    op: Callable[[Arguments], tuple[OpRecord, Arguments]],
    outputs: Callable[[Arguments], int],
    tokens: str,
) -> PublicCall:
    """A function as engines that generate code see it.

    Args:
        op: maps a call's arguments to the op and the op's arguments. tokens: the name of the
            tensor whose length is the number of tokens of a part.
    """

    def checked(given: Arguments) -> tuple[OpRecord, Arguments]:
        refuse_layouts(function, given)
        lengths = given["cu_seqlens"]
        if lengths is not None and not isinstance(lengths, Tensor):
            given = {**given, "cu_seqlens": without_data((len(lengths),), torch.int64)}
        return op(given)

    def with_fake_peers(given: Arguments, sites: Sequence[SplitSite]) -> Arguments:
        parts = next((site.parts for site in sites if site.identifier == "l"), 1)
        total = given[tokens].shape[1] * parts
        return {**with_fake_group(given, sites), **one_document(given, total, total)}

    return PublicCall(
        function,
        checked,
        outputs,
        lambda site: {"process_group": list(site.ranks), "layout": None},
        fake_peers=with_fake_peers,
        follow=layout_code,
    )
