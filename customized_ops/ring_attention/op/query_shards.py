"""Calls in which q is one part of its rows or of its heads, while k and v are whole.

An engine that cuts only q need not move k and v inside the op: it brings them whole, and tells the
op which part of q it holds. Gradients of k and v are then of whole size on every rank, and their
sum over the ranks is the gradient.

    rows, part 1 of 2, causal      heads, part 1 of 2 of 6, 3 heads of k
    q  . . 2 3                     q  . . . 3 4 5
    k  0 1 2 3                     k  0 0 1 1 2 2    heads 1 2 2 of k, one for each of q
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..core.layout import Layout
from ..core.mask import AttnMask
from ..core.merge.merge import accumulation_dtype
from ..core.plan.over_buffers import over_buffers
from .arguments import ArgumentError
from .mask_source import Problem
from .options import OpOptions
from .tokens.call_layouts import by_lengths

HEADS = -2


def refuse_with_parts(op: str, options: OpOptions, ranks: int) -> None:
    """Refuse what does not go with a part of q."""
    both = ("q_rows", options.row_parts), ("q_heads", options.head_parts)
    names = [name for name, parts in both if parts]
    if names and options.dropout_p:
        raise ArgumentError(
            f"{op}: dropout_p={options.dropout_p} does not go with {names[0]}: it draws by the "
            "tokens and heads of the whole; set it to 0"
        )
    if not options.row_parts:
        return
    if ranks > 1:
        raise ArgumentError(
            f"{op}: with q_rows k and v are whole and nothing moves; leave process_group None, got "
            f"a group of {ranks} ranks"
        )
    layouts = {"layout": options.layout, "k_layout": options.k_layout}
    if _cuts_rows(options.layout, options.row_parts):
        del layouts["layout"]
    for name, layout in layouts.items():
        if layout:
            raise ArgumentError(
                f"{op}: with q_rows k and v are whole and q is cut contiguously; leave {name} None,"
                f" got {layout}"
            )


def _bounds(op: str, what: str, total: int, part: int, parts: int, held: int) -> tuple[int, int]:
    """Start and stop of a part, cut as DTensor's ``Shard`` cuts."""
    each = -(-total // parts)
    start, stop = (min(n * each, total) for n in (part, part + 1))
    if stop - start != held:
        raise ArgumentError(
            f"{op}: part {part} of {parts} of {total} {what} is {start}:{stop}, but q has {held} "
            f"{what}"
        )
    return start, stop


def _cuts_rows(layout: str, parts: int) -> bool:
    """Whether a layout may say how rows are cut into ``parts``."""
    several = bool(layout) and parts > 1
    return by_lengths(layout) or (several and Layout.parse(layout).group_size == parts)


def rows_of(
    op: str,
    problem: Problem,
    options: OpOptions,
    rows: int,
    aligned: bool,
    layout: Layout | None = None,
) -> Problem:
    """The problem of the ``rows`` rows that q holds.

    Args:
        aligned: whether scores depend on the distance of a row and a key.
        layout: how q is cut into parts; None if contiguously.
    """
    if layout is not None:
        return _laid_out_rows(op, problem, options.row_part, rows, aligned, layout)
    mask = problem.mask
    part = options.row_part, options.row_parts
    start, stop = _bounds(op, "tokens", mask.q_len, *part, rows)
    positions = problem.key_positions
    if aligned:  # positions are on the scale of the whole q
        if positions is None:
            positions = np.arange(mask.k_len) - (mask.k_len - mask.q_len)
        positions = positions - start
    layout = Layout.contiguous(stop - start, 1)
    return Problem(_mask_of_rows(mask, start, stop), layout, problem.k_layout, positions)


def _laid_out_rows(
    op: str, problem: Problem, part: int, rows: int, aligned: bool, layout: Layout
) -> Problem:
    mask = problem.mask
    if layout.total != mask.q_len or layout.sizes[part] != rows:
        raise ArgumentError(
            f"{op}: part {part} of {layout} has {layout.sizes[part]} tokens of {layout.total}, but "
            f"q has {rows} of {mask.q_len}"
        )
    if aligned:
        raise ArgumentError(
            f"{op}: alibi_slopes do not go with rows of a layout, which may lie apart; leave them "
            "None, or use wrap_ring_attn_varlen_func"
        )
    return Problem(
        _mask_of_part(mask, layout, part), Layout.contiguous(rows, 1), problem.k_layout, None
    )


@lru_cache(maxsize=256)
def _mask_of_part(mask: AttnMask, layout: Layout, part: int) -> AttnMask:
    pieces = layout.pieces[layout.pieces[:, 0] == part, 1:]
    keys = np.array([[0, mask.k_len, 0]], dtype=np.int64)
    return AttnMask(over_buffers(mask.slices, pieces, keys), layout.sizes[part], mask.k_len)


@lru_cache(maxsize=256)
def _mask_of_rows(mask: AttnMask, start: int, stop: int) -> AttnMask:
    return mask.restrict((start, stop)).shift(-start, 0, q_len=stop - start)


@dataclass(frozen=True)
class KeyHeads:
    """The heads of k and v that belong to some heads of q.

    Attributes:
        first, count: the first of those heads of q, among all heads of q, and how many they are.
        group: heads of q per head of k.
    """

    first: int
    count: int
    group: int

    @staticmethod
    def of_call(op: str, options: OpOptions, q_heads: int, kv_heads: int) -> KeyHeads | None:
        """Those of a call with these heads of q and of k on this rank; None if q has all heads."""
        parts, total = options.head_parts, options.head_total
        if not parts:
            return None
        if (total % kv_heads) if kv_heads else total:
            raise ArgumentError(
                f"{op}: k has {kv_heads} heads and q {total}, of which it holds part "
                f"{options.head_part} of {parts}; the heads of q must be a multiple of those of k"
            )
        start, stop = _bounds(op, "heads", total, options.head_part, parts, q_heads)
        return KeyHeads(start, stop - start, total // kv_heads if kv_heads else 1)

    @property
    def held(self) -> int:
        """How many heads :meth:`of` gives."""
        return self._run[1] if self._in_one_run else self.count

    def of(self, t: Tensor) -> Tensor:
        """These heads of k or v: a view where q has whole groups, or heads of one group; else one
        head for each head of q."""
        if self._in_one_run:
            return t.narrow(HEADS, *self._run)
        each = torch.arange(self.first, self.first + self.count, device=t.device) // self.group
        return t.index_select(HEADS, each)

    def spread(self, grad: Tensor, like: Tensor) -> Tensor:
        """The gradient of ``like`` from the gradient of ``of(like)``; zero where none flows."""
        first, heads = self._run
        if not self._in_one_run:  # add up those of each group, the first and last filled with zeros
            before = self.first % self.group
            after = heads * self.group - before - self.count
            wide = grad.to(accumulation_dtype(grad.dtype))
            filled = torch.nn.functional.pad(wide, (0, 0, before, after))
            grad = filled.unflatten(HEADS, (heads, self.group)).sum(HEADS)
        result = torch.zeros_like(like)
        result.narrow(HEADS, first, heads).copy_(grad)
        return result

    @property
    def _in_one_run(self) -> bool:
        whole = self.first % self.group == 0 and self.count % self.group == 0
        return whole or self.first // self.group == (self.first + self.count - 1) // self.group

    @property
    def _run(self) -> tuple[int, int]:
        """First head of k and the number of heads from there on, to the last that is needed."""
        if not self.count:
            return 0, 0
        first = self.first // self.group
        return first, (self.first + self.count - 1) // self.group - first + 1
