"""Jobs for the tests of TransformerEngine's context parallelism; see ``ranks.Pool``."""

from __future__ import annotations

from typing import Any

import pytest
import te_cp_stand_in
import torch
import torch.distributed as dist
from op_cases import Case
from torch import Tensor

from customized_ops.ring_attention.core.kernels import Capabilities
from customized_ops.ring_attention.core.kernels.adapters import te


def run_cases(
    cases: list[tuple[Case, str]], members: tuple[int, ...], stand_in: bool
) -> list[list[Tensor]]:
    """out, dq, dk, dv of this rank's shard, for each case and kernel."""
    with pytest.MonkeyPatch.context() as patch:
        if stand_in:
            te_cp_stand_in.install(patch)
            able = Capabilities("cpu", (torch.float64,), features=("window",))
            patch.setattr(te, "missing", lambda: None)
            patch.setattr(te, "CAPABILITIES", (able,))
        results = []
        for case, kernel in cases:
            done = len(te_cp_stand_in.calls)
            results.append(_run(case, kernel, members))
            comm_types = te_cp_stand_in.calls[done:]
            wanted = {"te_cp": "p2p"}.get(kernel, kernel.partition(":")[2])
            assert not stand_in or comm_types == [wanted] * 2, "a forward, and one more to go back"
        return results


def _run(case: Case, kernel: str, members: tuple[int, ...]) -> list[Tensor]:
    rank, dim = members.index(dist.get_rank()), 0 if case.packed else 1
    layout = case.layout_of(len(members))
    q, k, v, dout = (layout.shard(t, rank, dim) for t in case.tensors())
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    where: dict[str, Any] = {"process_group": list(members), "layout": layout}
    out = case.call(*leaves, **where, kernel=kernel, return_lse=False)
    grads = torch.autograd.grad(out, leaves, dout)
    return [t.detach().cpu() for t in (out, *grads)]
