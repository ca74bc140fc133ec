"""Checks of the arguments that ops along a sequence share: documents, layout and group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from annotations.consistency import digest

from ..ring_attention.core.arrays import Ints
from ..ring_attention.core.comm import Comm
from ..ring_attention.core.comm.comm_groups import GroupLike, comm_by_name, group_name
from ..ring_attention.core.layout import Layout
from ..ring_attention.op.arguments import ArgumentError, require
from ..ring_attention.op.tokens.call_layouts import (
    by_lengths,
    layout_by_lengths,
    layout_of,
    refuse_layouts_of_ranks,
)
from ..ring_attention.op.tokens.lengths import (
    CuSeqlens,
    as_tensor,
    check_cu_seqlens,
    check_total,
    on_host,
)
from .segments import Segments, segments_of

LONGEST = 48  # characters; a longer fact is shortened


def check_tensors(op: str, given: Mapping[str, Any]) -> None:
    """Check that all are floating point and on the device of the first one."""
    first = next(iter(given))
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
        if not tensor.dtype.is_floating_point:
            raise ArgumentError(f"{op}: {name} must be floating point, got {tensor.dtype}")
        if tensor.device != given[first].device:
            where = f"{name} is on {tensor.device} but {first} is on {given[first].device}"
            raise ArgumentError(f"{op}: {where}; give one device")


def checked_documents(
    op: str, tokens: Tensor, cu_seqlens: CuSeqlens | None, group: GroupLike
) -> Tensor | None:
    """``cu_seqlens`` as the tensor that the op takes, checked. With ``cu_seqlens`` the batch is 1;
    on a single rank, they must end at its number of tokens."""
    if cu_seqlens is None:
        return None
    lengths = as_tensor(op, "cu_seqlens", cu_seqlens)
    if tokens.shape[0] != 1:
        raise ArgumentError(
            f"{op}: with cu_seqlens the batch is 1 (documents follow one another along dim 1), got "
            f"shape {tuple(tokens.shape)}"
        )
    if not torch.compiler.is_compiling():
        ends = on_host(lengths)
        check_cu_seqlens(op, "cu_seqlens", ends)
        if comm_by_name(group_name(group)).size == 1:
            check_total(op, "cu_seqlens", ends, tokens.shape[1])
    return lengths


def checked_segments(
    op: str, local: int, cu_seqlens: Tensor | None, layout: Layout | None, group: GroupLike
) -> tuple[str, Segments | None]:
    """The layout as the string that the op takes, and the segments (None while tracing a graph).

    Args:
        local: number of this rank's tokens. cu_seqlens: from :func:`checked_documents`.
    """
    fits = layout is None or isinstance(layout, Layout)
    require(fits, op, "layout", "a Layout or None", layout)
    name, spec = group_name(group), "" if layout is None else layout.spec
    if torch.compiler.is_compiling():
        if not name:
            refuse_layouts_of_ranks(op, layout=layout)
        return spec, None
    return spec, call_segments(op, local, cu_seqlens, spec, comm_by_name(name))


def call_segments(
    op: str, local: int, cu_seqlens: Tensor | None, spec: str, comm: Comm
) -> Segments:
    """The segments of a call of an op, from its arguments.

    Raises:
        ArgumentError: the layout does not fit this rank's tokens, or the documents.
    """
    ends: Ints | None = None if cu_seqlens is None else on_host(cu_seqlens)
    total = None if ends is None else int(ends[-1])
    if by_lengths(spec):
        if ends is None:
            raise ArgumentError(f"{op}: layout {spec!r} is made of cu_seqlens, but there are none")
        spec = layout_by_lengths(spec, ends, comm.size).spec
    layout = layout_of(op, comm, "layout", spec, local, total)
    return segments_of(layout, np.array([0, layout.total]) if ends is None else ends)


def facts_of(segments: Segments | None, shapes: Mapping[str, Tensor | None]) -> dict[str, str]:
    """What ranks compare about a call: shapes except for tokens, dtypes, layout and documents."""
    facts = {}
    for name, tensor in shapes.items():
        if tensor is not None:
            sizes = [str(n) for n in tensor.shape]
            sizes[1] = "*"
            facts[name] = f"({', '.join(sizes)}) {tensor.dtype}"
    if segments is not None:
        layout, ends = segments.layout, segments.ends
        facts["tokens"] = str(list(layout.sizes))
        facts["layout"] = _shown(layout.spec, layout.table)
        one = len(ends) == 2 and ends[-1] == layout.total  # the same as without cu_seqlens
        facts["cu_seqlens"] = "one document" if one else _shown(str(ends.tolist()), ends)
    return facts


def _shown(text: str, table: Ints) -> str:
    """A short text unchanged; a long one as its beginning and a hash that identifies it."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... {digest(torch.tensor(table))}"
