"""The orders of tokens in which an attention op can run, and which of them evens out the work."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from annotations.binding import BoundAnnotation
from annotations.rules import Follow, LateOrder, Order, Orders, SplitSite

from ..core.layout import Layout
from .mask_source import Arguments, MaskSource
from .tokens.call_layouts import BALANCED, BY_DOCUMENT, by_lengths, layout_when_cut
from .tokens.lengths import has_data
from .tokens.sequence_order import DOCUMENT_ORDER, TO_ORDER, layout_of_order, wanted_order


def orders_of(source: type[MaskSource]) -> Mapping[str, Orders]:
    """The orders of the sequence, ``l``, and of the rows alone, ``lq``."""
    return {
        "l": Orders(partial(_wanted, source), _named, _when_cut, partial(_follow, source)),
        "lq": Orders(
            lambda *_: None,
            partial(_any_of_rows, source),
            follow=partial(_follow, source, whole_keys=True),
        ),
    }


def layout_at(site: SplitSite, given: Arguments) -> Layout:
    """Which rank holds which tokens of a call that is cut."""
    return layout_when_cut(given["layout"], site.size, site.parts, given.get("cu_seqlens_q"))


def _wanted(
    source: type[MaskSource], bound: BoundAnnotation, site: SplitSite, given: Arguments
) -> Order | LateOrder | None:
    if not all(has_data(given[name]) for name in source.lengths):
        name = f"{BALANCED}{site.parts}"
        made_by, move = DOCUMENT_ORDER, (TO_ORDER, name)
        return LateOrder(name, site.size, source.lengths[0], made_by, move)
    mask = source.decode(given).mask(site.size, site.size)
    return None if mask is None or not mask.area else wanted_order(mask, site.parts)


def _named(given: Arguments, order: Order) -> dict[str, Any] | None:
    if given["group"] or given["layout"] or given["k_layout"] or given["row_parts"]:
        return None
    return {"layout": layout_of_order(order.tokens.tobytes()).spec}


def _when_cut(site: SplitSite, given: Arguments) -> dict[str, Any]:
    layout = given["layout"]
    if not layout:
        return {}
    return {"layout": layout if by_lengths(layout) else layout_at(site, given).spec}


def _follow(
    source: type[MaskSource], name: str, given: Arguments, whole_keys: bool = False
) -> Follow | str:
    packed = {"cu_seqlens_q", "cu_seqlens_k"} <= source.tensors.keys()
    if by_lengths(name) and not packed:
        return "only attention over packed documents (cu_seqlens) takes that order"
    if name != BY_DOCUMENT and whole_keys:
        return "a call of which only rows are cut takes no layout"
    if whole_keys and given.get("alibi_slopes") is not None:
        return "alibi_slopes do not go with rows of a layout, which may lie apart"
    own = [name for name in ("group", "layout", "k_layout", "row_parts") if given.get(name)]
    if whole_keys and given.get("row_parts") == 1:
        own.remove("row_parts")
    if own:
        return f"the call is given a {own[0]} of its own"
    lengths = ("cu_seqlens_q",) if whole_keys else ("cu_seqlens_q", "cu_seqlens_k")
    return Follow({"layout": name}, lengths if by_lengths(name) else ())


def _any_of_rows(source: type[MaskSource], given: Arguments, order: Order) -> dict[str, Any] | None:
    """No argument names the order: where all rows attend all keys, any order of rows will do."""
    q_len, k_len = given["q"].shape[-3], given["k"].shape[-3]
    mask = source.decode(given).mask(q_len, k_len)
    by_place = given["alibi_slopes"] is not None or given["dropout_p"] or given["group"]
    all_pairs = mask is not None and mask.area == q_len * k_len
    return {} if all_pairs and not by_place else None
