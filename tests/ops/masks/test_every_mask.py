"""Every kind of mask in every kind of layout, against dense attention on one device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from op_cases import Case, check_dense

from customized_ops.ring_attention import AttnMask, Layout

from .mask_cases import COSTS, cumulative, planned_for

Draw = Callable[[st.SearchStrategy[Any]], Any]

tokens = st.integers(1, 20)
some = st.integers(0, 8)
positive = st.integers(1, 6)
reach = st.integers(-1, 9)
windows = st.tuples(reach, reach)


@st.composite
def varlen(draw: Draw) -> AttnMask:
    lengths = draw(st.lists(some, min_size=1, max_size=5))
    others = st.lists(some, min_size=len(lengths), max_size=len(lengths))
    keys = draw(st.none() | others)
    return AttnMask.varlen(
        cumulative(lengths),
        None if keys is None else cumulative(keys),
        causal=draw(st.booleans()),
        window=draw(windows),
        global_tokens=draw(st.integers(0, 3)),
    )


@st.composite
def spans(draw: Draw, length: int) -> list[tuple[int, int]]:
    """The sequence cut anywhere into ranges, empty ones among them."""
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
    return list(zip([0, *cuts], [*cuts, length], strict=True))


def span(length: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, length), st.integers(0, length)).map(
        lambda pair: (min(pair), max(pair))
    )


@st.composite
def from_ranges(draw: Draw) -> AttnMask:
    """Disjoint query ranges with any keys; or disjoint key ranges with any queries, overlapping."""
    q_len, k_len = draw(tokens), draw(tokens)
    if draw(st.booleans()):
        q_ranges = draw(spans(q_len))
        k_ranges = [draw(span(k_len)) for _ in q_ranges]
    else:
        k_ranges = draw(spans(k_len))
        q_ranges = [draw(span(q_len)) for _ in k_ranges]
    types = [draw(st.integers(0, 3)) for _ in q_ranges]
    return AttnMask.from_ranges(q_ranges, k_ranges, types, q_len, k_len)


@st.composite
def from_dense(draw: Draw) -> AttnMask:
    shape = draw(tokens), draw(tokens)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    return AttnMask.from_dense(random.random(shape) < draw(st.floats(0, 1)))


@st.composite
def from_slices(draw: Draw) -> AttnMask:
    q_len, k_len = draw(tokens), draw(tokens)
    offset = st.integers(-20, 20)
    rows = [(*q, *draw(span(k_len)), draw(offset), draw(offset)) for q in draw(spans(q_len))]
    return AttnMask.from_slices(rows, q_len, k_len)


@st.composite
def from_block_mask(draw: Draw) -> AttnMask:
    rows, columns = draw(positive), draw(positive)
    bits = draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    block = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return AttnMask.from_block_mask(np.reshape(bits, (rows, columns)), block)


@st.composite
def union(draw: Draw) -> AttnMask:
    """One mask on some keys and another on the others."""
    n, cut = draw(tokens), draw(some)
    left = AttnMask.sliding_window(n, draw(reach), draw(reach))
    right = AttnMask.block_causal(n, draw(positive))
    cut = min(cut, n)
    return left.restrict(k_range=(0, cut)).union(right.restrict(k_range=(cut, n)))


@st.composite
def shift(draw: Draw) -> AttnMask:
    mask = AttnMask.causal(draw(positive), draw(positive))
    q_by, k_by = draw(some), draw(some)
    q_len, k_len = mask.q_len + q_by + draw(some), mask.k_len + k_by + draw(some)
    return mask.shift(q_by, k_by, q_len, k_len)


@st.composite
def restrict(draw: Draw) -> AttnMask:
    mask = AttnMask.streaming(draw(tokens), draw(reach), draw(some))
    return mask.restrict(draw(span(mask.q_len)), draw(span(mask.k_len)))


@st.composite
def prefix_tree(draw: Draw) -> AttnMask:
    """Nodes in depth-first order, each below the one before it or one above that."""
    parents: list[int] = []
    path: list[int] = []
    for node in range(draw(st.integers(1, 6))):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return AttnMask.prefix_tree(parents, [draw(some) for _ in parents])


block = st.integers(1, 3)
MASKS: dict[str, st.SearchStrategy[AttnMask]] = {
    "full": st.builds(AttnMask.full, tokens, st.none() | tokens),
    "causal": st.builds(AttnMask.causal, tokens, st.none() | tokens),
    "sliding_window": st.builds(AttnMask.sliding_window, tokens, reach, reach),
    "dense": st.builds(AttnMask.dense, tokens, tokens, causal=st.booleans(), window=windows),
    "varlen": varlen(),
    "prefix_lm": st.builds(AttnMask.prefix_lm, tokens, some),
    "block_causal": st.builds(AttnMask.block_causal, tokens, positive),
    "block_diffusion": st.builds(AttnMask.block_diffusion, st.integers(1, 12), positive),
    "prefix_tree": prefix_tree(),
    "shared_prefix": st.builds(AttnMask.shared_prefix, some, st.lists(positive, max_size=4)),
    "streaming": st.builds(AttnMask.streaming, tokens, reach, some, block=block),
    "strided": st.builds(AttnMask.strided, tokens, positive, reach, block=block),
    "global_local": st.builds(AttnMask.global_local, tokens, reach, some, block=block),
    "star": st.builds(AttnMask.star, tokens, positive, some),
    "from_dense": from_dense(),
    "from_slices": from_slices(),
    "from_ranges": from_ranges(),
    "from_block_mask": from_block_mask(),
    "union": union(),
    "shift": shift(),
    "restrict": restrict(),
}


def test_every_constructor_is_drawn() -> None:
    makers = {
        name
        for name, member in inspect.getmembers(AttnMask, callable)
        if not name.startswith("_")
        and inspect.signature(member).return_annotation in ("AttnMask", "Self")
    }
    assert makers == set(MASKS)


# ----------------------------------------------------------------------------------------- layouts


@st.composite
def documents(draw: Draw, total: int, ranks: int) -> Layout:
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=4)))
    return Layout.zigzag(total, ranks, [0, *cuts, total])


@st.composite
def uneven(draw: Draw, total: int, ranks: int) -> Layout:
    cuts = sorted(draw(st.integers(0, total)) for _ in range(ranks - 1))
    return Layout.from_sizes(np.diff([0, *cuts, total]).tolist())


@st.composite
def shuffled(draw: Draw, total: int, ranks: int) -> Layout:
    """Ranges on any rank, in any local order; some ranks may hold nothing."""
    own: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for piece in draw(st.permutations(draw(spans(total)))):
        own[draw(st.integers(0, ranks - 1))].append(piece)
    return Layout.from_ranges(own)


@st.composite
def paired(draw: Draw, total: int, ranks: int) -> Layout:
    half = draw(st.sampled_from([Layout.zigzag, Layout.striped]))(total // 2, ranks)
    return Layout.paired(half) if total % 2 == 0 else Layout.zigzag(total, ranks)


@st.composite
def balanced(draw: Draw, mask: AttnMask, total: int, ranks: int) -> Layout:
    square = mask if mask.q_len == mask.k_len else AttnMask.causal(total)
    return Layout.balanced(square, ranks, draw(st.none() | positive))


@st.composite
def layouts(draw: Draw, mask: AttnMask, total: int, ranks: int) -> Layout:
    kinds: dict[str, st.SearchStrategy[Layout]] = {
        "contiguous": st.just(Layout.contiguous(total, ranks)),
        "zigzag": st.just(Layout.zigzag(total, ranks)),
        "zigzag of documents": documents(total, ranks),
        "striped 1": st.just(Layout.striped(total, ranks)),
        "striped 3": st.just(Layout.striped(total, ranks, 3)),
        "paired": paired(total, ranks),
        "balanced": balanced(mask, total, ranks),
        "uneven": uneven(total, ranks),
        "shuffled": shuffled(total, ranks),
    }
    kind = draw(st.sampled_from(list(kinds)))
    event(f"layout {kind}")
    return draw(kinds[kind])


# ---------------------------------------------------------------------------------- the comparison


@st.composite
def cases(draw: Draw, mask: AttnMask) -> tuple[Case, int]:
    ranks = draw(st.integers(1, 8))
    q_layout = draw(layouts(mask, mask.q_len, ranks))
    same = mask.q_len == mask.k_len and draw(st.booleans())
    k_layout = q_layout if same else draw(layouts(mask, mask.k_len, ranks))
    few = [(1, 1), (2, 2), (4, 2), (6, 1), (8, 4)]
    heads = draw(st.sampled_from([*few, (ranks, ranks), (2 * ranks, ranks)]))
    rarely = st.integers(0, 3).map(lambda n: n == 0)
    case = Case(
        "masked",
        mask.q_len,
        given=mask,
        heads=heads,
        batch=draw(st.integers(1, 2)),
        dims=(4, 3),
        layout=q_layout.spec,
        k_layout=k_layout.spec,
        softcap=1.5 * draw(rarely),
        alibi=draw(rarely),
        dropout=0.3 * draw(rarely),
        sink=draw(rarely),
    )
    return case, ranks


@pytest.mark.thin(4)
@pytest.mark.parametrize("kind", MASKS)
@settings(deadline=None, derandomize=True, max_examples=5)
@given(data=st.data())
def test_equals_dense(kind: str, data: st.DataObject) -> None:
    mask = data.draw(MASKS[kind])
    case, ranks = data.draw(cases(mask))
    dear = data.draw(st.sampled_from(list(COSTS)))
    with planned_for(COSTS[dear]) as make:
        plan = make(mask, *case.layouts(ranks), heads=case.heads, team_size=None)
        event(f"mask {kind}")
        event(f"{ranks} ranks")
        event(f"teams of {plan.team_size}")
        event("rows move" if plan.q_tokens().any() else "rows stay")
        check_dense(case, ranks)
