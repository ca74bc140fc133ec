"""The specification that everything is compared with: attention over a dense mask, in plain torch.

None of the package's kernels is used, so an error in them cannot hide here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.mask import AttnMask


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttnMask | Tensor,
    softmax_scale: float,
    *,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    sink: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of all pairs at once, in the dtype of the inputs; differentiable.

    Args:
        q: [b, l, h, d], k: [b, m, g, d], v: [b, m, g, e]; h is a multiple of g.
        mask: an AttnMask, or bool[l, m], True where a pair is attended.
        softcap: scores become softcap * tanh(score / softcap); 0 is no cap.
        alibi_slopes: [b or 1, h]: what a score loses per token between row i and
            ``key_positions[j]`` (int64[m]; j where not given), after the cap.
        keep: bool[b, h, l, m], dropout's mask: where it is False the probability is 0, elsewhere
            it is divided by 1 - dropout_p. lse is not affected.
        sink: [h], a logit of each head that joins the sum of every row and has no value.
    Returns:
        out [b, l, h, e] and lse [b, h, l], which includes the sink. A row with no key gives 0 and
        -inf (with a sink, the sink); its gradients are 0.
    """
    allowed = mask if isinstance(mask, Tensor) else torch.from_numpy(mask.to_dense())
    (rows, keys), heads = allowed.shape, q.shape[2]
    k, v = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi_slopes is not None:
        positions = torch.arange(keys) if key_positions is None else key_positions
        distance = (torch.arange(rows).unsqueeze(1) - positions).abs()
        scores = scores - (alibi_slopes.double()[..., None, None] * distance).to(scores.dtype)
    if sink is not None:  # one more key, that every row attends
        column = sink.view(1, heads, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column.to(scores.dtype)], dim=-1)
        allowed = torch.cat([allowed, torch.ones(rows, 1, dtype=torch.bool)], dim=-1)
    unattended = ~allowed.any(dim=-1)
    # Rows with no key keep their scores, so that no step divides by zero; they are blanked after.
    scores = scores.masked_fill(~(allowed | unattended.unsqueeze(-1)), -torch.inf)
    weights = (torch.softmax(scores, dim=-1) * allowed)[..., :keys]
    lse = torch.logsumexp(scores, dim=-1).masked_fill(unattended, -torch.inf)
    if keep is not None:
        weights = weights * keep / (1 - dropout_p)
    return torch.einsum("bhij,bjhe->bihe", weights, v), lse


def dense_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttnMask | Tensor,
    softmax_scale: float,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    **scoring: Any,
) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv) of :func:`dense_attention` for the gradients of out and, if it has
    one, of lse.

    With a ``sink`` its gradient comes last. ``scoring``: further keywords of dense_attention.
    """
    given = {"q": q, "k": k, "v": v} if sink is None else {"q": q, "k": k, "v": v, "sink": sink}
    leaves: dict[str, Any] = {name: t.detach().requires_grad_() for name, t in given.items()}
    out, lse = dense_attention(**leaves, mask=mask, softmax_scale=softmax_scale, **scoring)
    results, grads = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse.to(lse.dtype)])
    found = torch.autograd.grad(results, list(leaves.values()), grads)
    return out.detach(), lse.detach(), *found
