"""What attention should be: in fp64, and in the case's dtype by the formulas that kernels use."""

from __future__ import annotations

import torch
from dense import dense_attention
from torch import Tensor

from .cases import Case, Inputs

Results = dict[str, Tensor]  # out, lse, dq, dk, dv and, where there is one, dsink


def truth(case: Case, given: Inputs) -> Results:
    """Dense attention in fp64."""
    mask = torch.from_numpy(case.make_mask().to_dense()).to(given.q.device)
    tensors = {"dq": given.q, "dk": given.k, "dv": given.v, "dsink": given.sink}
    leaves = {
        name: t.detach().double().requires_grad_() for name, t in tensors.items() if t is not None
    }
    with given.q.device:
        out, lse = dense_attention(
            leaves["dq"],
            leaves["dk"],
            leaves["dv"],
            mask,
            case.scoring.softmax_scale,
            softcap=case.softcap,
            sink=leaves.get("dsink"),
        )
    ends, gradients = [out], [given.dout.double()]
    if given.dlse is not None:
        ends, gradients = [out, lse], [*gradients, given.dlse.double()]
    made = torch.autograd.grad(ends, list(leaves.values()), gradients)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, made, strict=True))}


def textbook(case: Case, given: Inputs) -> Results:
    """Dense attention in the case's dtype, by the formulas that kernels use."""
    mask = torch.from_numpy(case.make_mask().to_dense()).to(given.q.device)
    g, scale = case.heads[1], case.scoring.softmax_scale

    def rounded(x: Tensor) -> Tensor:
        return x.to(case.dtype).float()

    q, dout = (t.float().unflatten(2, (g, -1)) for t in (given.q, given.dout))
    k, v = given.k.float(), given.v.float()
    scores = torch.einsum("bignd,bjgd->bgnij", q, k) * scale
    slope = torch.ones(())
    if case.softcap:
        share = torch.tanh(scores / case.softcap)
        scores, slope = case.softcap * share, 1 - share.square()
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    sink = None if given.sink is None else given.sink.float().view(g, -1, 1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    p = torch.exp(scores - finite.unsqueeze(-1))
    out = rounded(torch.einsum("bgnij,bjge->bigne", rounded(p), v))
    delta = (dout * out).sum(-1).permute(0, 2, 3, 1)
    if given.dlse is not None:
        delta = delta - given.dlse.unflatten(1, (g, -1))
    dp = torch.einsum("bigne,bjge->bgnij", dout, v)
    ds = rounded(p * (dp - delta.unsqueeze(-1)) * slope)
    made = {
        "out": out.flatten(2, 3),
        "lse": lse.flatten(1, 2),
        "dq": rounded(torch.einsum("bgnij,bjgd->bignd", ds, k) * scale).flatten(2, 3),
        "dk": rounded(torch.einsum("bgnij,bignd->bjgd", ds, q) * scale),
        "dv": rounded(torch.einsum("bgnij,bigne->bjge", rounded(p), dout)),
    }
    if sink is not None:
        made["dsink"] = rounded(-(torch.exp(sink - finite) * delta).sum((0, 3)).flatten())
    return made
