"""Jobs for GPUs whose ranks attend other documents in each step; see ``symmetric_jobs``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from op_cases import Case
from rank_groups import Rows, in_their_own_time
from symmetric_jobs import differing, drawn, group_of, step

from customized_ops.ring_attention.core.comm.comm_groups import comm_by_name
from customized_ops.ring_attention.core.run.replays import replay


@in_their_own_time
def new_documents(case: Case, rows: Rows, steps: int) -> list[str]:
    """Steps over contiguous shards, each of documents that come once, beside one without tapes, of
    which it has all bits; many are replayed from a tape of other documents."""
    group = group_of("symmetric", rows, "new documents")
    taken: list[int] = []
    whole = replay._take_over

    def take_over(seen: Any, *given: Any) -> None:
        is_new = seen.tape is None
        whole(seen, *given)
        taken.extend([1] * (is_new and seen.tape is not None))

    wrong = []
    with mock.patch.object(replay, "_take_over", take_over):
        for n in range(steps):
            documents = replace(case, cu_seqlens=_ends(case.length, group.size(), n))
            leaves, dout = drawn(documents, rows, n)
            with replay.replay(False):
                want = step(documents, group, leaves, dout)
            wrong += differing(f"step {n}", step(documents, group, leaves, dout), want)
    comm: Any = comm_by_name(group.group_name)
    if len(taken) < steps // 2 or not comm.writes_to_peers:  # a quarter of all passes
        wrong.append(f"{len(taken)} of {2 * steps} passes had a tape of other documents")
    return wrong


def _ends(tokens: int, ranks: int, seed: int) -> tuple[int, ...]:
    """Where documents end: each rank but the last has the first few tokens of one."""
    draw = np.random.default_rng(seed)
    shard = tokens // ranks
    crossing = [at - int(draw.integers(1, shard // 16)) for at in range(shard, tokens, shard)]
    others = draw.choice(np.arange(1, tokens), 8, replace=False).tolist()
    return (0, *sorted({*crossing, *others}), tokens)
