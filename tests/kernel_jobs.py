"""Jobs for op calls with a kernel by name, in low precision; see ``ranks.Pool``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from op_cases import Case, run_rank
from torch import Tensor

from customized_ops.ring_attention.core.kernels import KernelError


@dataclass(frozen=True)
class KernelCase(Case):
    """A case of the ops, with the kernel that runs it."""

    kernel: str = "auto"

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, **where: Any
    ) -> Any:
        """See :class:`~op_cases.Case`."""
        return super().call(q, k, v, sink, kernel=self.kernel, **where)


Answer = tuple[list[Tensor], list[Tensor]] | str


def cut_and_alone(cases: list[KernelCase]) -> list[Answer]:
    """Each case over all ranks, and whole on this rank; or why its kernel refuses it.

    Both on every rank, so that they compile the same and none waits long for another.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    answers: list[Answer] = []
    for case in cases:
        whole = replace(case, layout=None, k_layout=None, sizes=None, k_sizes=None)
        try:
            alone = run_rank(whole, 0, 1, None)
            cut = run_rank(case, rank, ranks, list(range(ranks)))
        except KernelError as error:
            answers.append(str(error))
        else:
            answers.append(([t.cpu() for t in cut], [t.cpu() for t in alone]))
        if case.device == "cuda":
            torch.cuda.empty_cache()
    return answers
