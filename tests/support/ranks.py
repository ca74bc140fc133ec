"""Real ranks for tests: jobs live in modules of this folder, not in test files, because fresh
processes import them. ``worlds`` says over which pools a test runs:

    @worlds(cpus=[4], gpus=[4, 8])
    def test(ranks: Pool) -> None: ...
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from customized_ops.ring_attention.fuzz.processes import PRELOADED, JobFailed, Pool, pool_name

PRELOADED.append("tests.support.preloaded")

__all__ = ["JobFailed", "Pool", "worlds"]


def worlds(*, cpus: Sequence[int] = (), gpus: Sequence[int] = (2, 4, 8)) -> pytest.MarkDecorator:
    """Run a test over pools of so many CPU processes and of so many GPUs: its ``ranks``.

    Where a machine has fewer GPUs the test is skipped. ``-k 4gpus`` selects what runs on 4. Of
    several pools of CPUs all but the smallest are slow.
    """
    slow = {n: pytest.mark.slow if n > min(cpus) else () for n in cpus}
    params = [pytest.param(("gloo", n), id=pool_name("gloo", n), marks=slow[n]) for n in cpus]
    params += [
        pytest.param(("nccl", n), id=pool_name("nccl", n), marks=pytest.mark.gpu) for n in gpus
    ]
    return pytest.mark.parametrize("ranks", params, indirect=True)
