"""Rollouts that are packed, laid out and planned before the step that attends to them."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from customized_ops.ring_attention import (
    ArgumentError,
    Layout,
    PackRollouts,
    RolloutPart,
    group_costs,
    pack_rollouts,
    rollout_parts,
    run_ranks,
    wrap_masked_attn_func,
)
from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.plan import plan as plans

RANKS, HEADS, DIM = 2, (4, 2), 8


def drawn(seed: int) -> list[tuple[list[int], int]]:
    """Rollouts of two prompts."""
    source = random.Random(seed)
    rollouts = []
    for _ in range(2):
        prompt = [source.randrange(9) for _ in range(source.randrange(5, 20))]
        for _ in range(3):
            answer = [source.randrange(9) for _ in range(source.randrange(1, 9))]
            rollouts.append((prompt + answer, len(prompt)))
    return rollouts


STEPS = [drawn(seed) for seed in range(3)]


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("share", [False, True])
def test_attention_finds_what_was_made_ahead(
    share: bool, sent: bool, recwarn: pytest.WarningsRecorder
) -> None:
    def packed(comm: Comm) -> list[RolloutPart]:
        where = {"ranks": RANKS, "rank": comm.rank, "costs": group_costs(comm)}
        return list(rollout_parts(STEPS, heads=HEADS, head_dim=DIM, share=share, **where))

    of_ranks = run_ranks(RANKS, packed)
    if sent:
        of_ranks = pickle.loads(pickle.dumps(of_ranks))

    def attend(comm: Comm) -> None:
        for part in of_ranks[comm.rank]:
            q, k, v = (torch.ones(1, len(part.tokens), heads, DIM) for heads in (4, 2, 2))
            where = {"layout": part.layout, "process_group": comm}
            wrap_masked_attn_func(q, k, v, part.mask, **where)

    known = len(plans._PLANS)
    run_ranks(RANKS, attend)
    assert len(plans._PLANS) == known and not recwarn.list
    for rank, made in enumerate(of_ranks):
        for rollouts, part in zip(STEPS, made, strict=True):
            rows, prompts = zip(*rollouts, strict=True)
            whole = pack_rollouts(rows, prompts, share=share)
            assert part.layout == Layout.balanced(whole.mask, RANKS) == part.plan.q_layout
            want = whole.part(part.layout, rank)
            assert torch.equal(part.tokens, want.tokens) and torch.equal(part.rows, want.rows)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ArgumentError, match="rank must be 0 to 1, got 2"):
        PackRollouts(2, 2, HEADS)
    with pytest.raises(ArgumentError, match="rollouts must be one or more, got none"):
        PackRollouts(2, 0, HEADS)([])
    for plain in ([3, 4, 5], torch.arange(2), [3, 4], ([3, 4], [2]), "ab", ([3], "a")):
        with pytest.raises(ArgumentError, match=r"rollouts\[1\] must be a pair of tokens and the"):
            PackRollouts(2, 0, HEADS)([([1, 2], 1), plain])
    for name, value in {"ranks": "2", "rank": None, "costs": "h100", "head_dim": 0}.items():
        given: Any = {"ranks": 2, "rank": 0, "heads": HEADS} | {name: value}
        with pytest.raises(ArgumentError, match=f"PackRollouts: {name} must be .*, got {value!r}"):
            PackRollouts(**given)
    for value in (0, "2", 1.5):
        with pytest.raises(ArgumentError, match=f"rollout_parts: ahead must be .*, got {value!r}"):
            rollout_parts([], ranks=2, rank=0, heads=HEADS, ahead=value)  # type: ignore[arg-type]


def test_parts_of_a_loader_are_passed_on() -> None:
    pack = PackRollouts(RANKS, 1, HEADS, head_dim=DIM)
    rollouts = [rollout for step in STEPS for rollout in step]
    loader = DataLoader(rollouts, batch_size=6, collate_fn=pack)
    want = [pack(step) for step in STEPS]
    found = list(rollout_parts(loader, ranks=RANKS, rank=1, heads=HEADS, head_dim=DIM))
    assert len(found) == len(want)
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one.tokens, other.tokens) and one.layout == other.layout
    for other in ({"ranks": 4}, {"rank": 0}, {"share": False}):
        given = {"ranks": RANKS, "rank": 1, "heads": HEADS, "head_dim": DIM} | other
        ((name, value),) = other.items()
        told = rf"batches with {name}=.*, but rollout_parts was given {name}={value}"
        with pytest.raises(ValueError, match=told):
            next(rollout_parts(loader, **given))


def test_errors_come_where_they_are_due_and_the_thread_ends() -> None:
    def loader() -> Iterator[Any]:
        yield STEPS[0]
        raise OSError("no more rollouts")

    made = rollout_parts(loader(), ranks=2, rank=1, heads=HEADS)
    assert isinstance(next(made), RolloutPart)
    with pytest.raises(OSError, match="no more rollouts"):
        next(made)
    more = rollout_parts(STEPS, ranks=2, rank=1, heads=HEADS)
    next(more)
    more.close()
    assert not [t for t in threading.enumerate() if t.name == "rollout_parts"]
