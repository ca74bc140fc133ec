"""Columns that are added to operands: zeros, for libraries that want q, k and v equally wide; the
gradient of lse, for libraries whose backward takes none.

d lse / d scores is the probabilities, so a gradient of lse enters where rowsum(dout * out) does,
with the opposite sign:  dscores = P * (dout v^T - rowsum(dout * out) + dlse).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...tape import computed
from ..protocol.kernel import BackwardOperands, ForwardOperands, Grads


def inputs_of_same_width(given: ForwardOperands) -> ForwardOperands:
    """The operands of a forward, zero-padded to one width: zeros change neither scores nor the
    columns that are kept. A tensor that needs no padding is returned as it is."""
    return ForwardOperands(*_same_width(given))


def operands_of_same_width(given: BackwardOperands) -> BackwardOperands:
    """The same for all operands of a backward."""
    dout, q, k, v, out = _same_width(given[:5])
    return BackwardOperands(dout, q, k, v, out, given.lse, given.dlse)


def _same_width(tensors: Sequence[Tensor]) -> list[Tensor]:
    width = max(t.shape[-1] for t in tensors)
    return [t if t.shape[-1] == width else computed(_widened, t, width) for t in tensors]


def _widened(t: Tensor, width: int) -> Tensor:
    """``t``, padded, with dense columns: ``pad`` keeps what it takes for channels-last strides,
    which a single column of a single head can have."""
    return pad(t, (0, width - t.shape[-1])).contiguous()


def first_columns(t: Tensor, width: int) -> Tensor:
    """The first ``width`` columns: a view, or ``t`` itself if it has no more."""
    return t if t.shape[-1] == width else t[..., :width]


def cut_to(grads: Iterable[Tensor], given: BackwardOperands) -> Grads:
    """dq, dk, dv without the columns that q, k and v do not have: views, or what was given."""
    inputs = given.q, given.k, given.v
    dq, dk, dv = [first_columns(g, t.shape[-1]) for g, t in zip(grads, inputs, strict=True)]
    return dq, dk, dv


def widened(given: BackwardOperands, columns: int = 1) -> BackwardOperands:
    """The operands without dlse, which columns added to dout, out and v carry instead.

    With out = 1, dout = -dlse and v = 0 in one more column, the row sum gains -dlse and nothing
    else changes. Further columns are 0. dv has as many more columns, which mean nothing.
    """
    dout, _, _, v, out, _, dlse = given
    if dlse is None:
        return given
    column = dlse.transpose(1, 2).unsqueeze(-1).to(dout.dtype)
    rest = [] if columns == 1 else [column.new_zeros((*column.shape[:-1], columns - 1))]
    return given._replace(
        dout=torch.cat([dout, -column, *rest], dim=-1),
        out=torch.cat([out, torch.ones_like(column), *rest], dim=-1),
        v=pad(v, (0, columns)),
        dlse=None,
    )


def apart(given: BackwardOperands) -> BackwardOperands | None:
    """Operands of one more backward call, whose dq and dk are what dlse adds to them; None if there
    is no dlse. For a library that takes no wider v.

    With v = 0 and, in the first column, out = 1 and dout = -dlse, only dlse is left of the formula
    above. The call's dv means nothing.
    """
    if given.dlse is None:
        return None
    dout, ones = torch.zeros_like(given.out), torch.zeros_like(given.out)
    dout[..., 0] = -given.dlse.transpose(-1, -2)
    ones[..., 0] = 1
    return given._replace(dout=dout, out=ones, v=torch.zeros_like(given.v), dlse=None)
