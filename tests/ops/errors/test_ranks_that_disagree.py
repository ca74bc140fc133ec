"""Calls that are wrong on all ranks, and ranks that do not agree: all get the same error."""

from __future__ import annotations

import re
from typing import Any

import op_jobs
import pytest
import torch
from ranks import Pool

from customized_ops.ring_attention import AttnMask, Layout, wrap_ring_attn_func

from .error_cases import K, Q, masked, said_by_ranks

SLOPES, BF16 = torch.ones(4), torch.bfloat16


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.zeros(2, 8, 3, 16)}, "q has 4 heads and k has 3"),
        ({"k": torch.zeros(2, 7, 2, 16)}, "dim 1 of k is 'l' = 8"),
        ({"v": torch.zeros(2, 9, 2, 16)}, "dim 1 of v is 'l' = 8"),
        ({"k": K.double()}, "k is torch.float64 but q is torch.float32"),
        ({"return_attn_probs": True}, "return_attn_probs=True is not supported yet"),
        ({"layout": Layout.contiguous(9, 3)}, "holds 8 tokens, but layout contiguous:9:3 gives it"),
        ({"layout": Layout.contiguous(16, 2)}, "is for 2 ranks, but the group has 3"),
    ],
)
@pytest.mark.parametrize("checking", [True, False])
def test_a_call_wrong_on_all_ranks_is_refused_by_all_before_anything_is_sent(
    checking: bool, changed: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQSHARD_CHECK", str(int(checking)))

    def call(comm: Any) -> None:
        monkeypatch.setattr(comm, "start", None)  # nothing may be sent
        wrap_ring_attn_func(**{"q": Q, "k": K, "v": K, "process_group": comm, **changed})

    said = said_by_ranks(3, call)
    assert all(message in text for text in said)
    assert len({re.sub(r"rank \d", "rank r", text) for text in said}) == 1


def test_a_layout_for_other_sizes_is_refused_on_every_rank() -> None:
    def call(comm: Any) -> None:
        wrap_ring_attn_func(Q, K, K, process_group=comm, layout=Layout.from_sizes([8, 8, 7]))

    first, second, third = said_by_ranks(3, call)
    assert "rank 2 of 3 holds 8 tokens, but layout sizes:8,8,7 gives it 7" in third
    assert first == second
    assert "refused on another rank of the group\nrank 2: wrap_ring_attn_func: rank 2" in first


@pytest.mark.parametrize(
    ("layout", "remedy"),
    [
        (Layout.contiguous(8, 2), "give this rank's own: layout.shard(x, rank)"),
        (None, "the whole sequence, all ranks' tokens together"),
    ],
)
def test_a_rank_that_holds_all_tokens_is_told_what_to_give(
    layout: Layout | None, remedy: str
) -> None:
    """A layout says that the tokens are too many; without one the mask may be of too few."""
    given = {"mask": AttnMask.causal(8), "layout": layout}
    said = said_by_ranks(2, lambda comm: masked(Q, K, process_group=comm, **given))
    assert all(remedy in text for text in said)
    assert all("speak of 8 tokens in all" in text for text in said)


def test_ranks_that_disagree_all_get_the_same_table() -> None:
    def call(comm: Any) -> None:
        window = (3, 0) if comm.rank == 1 else (-1, -1)
        wrap_ring_attn_func(Q, K, K, process_group=comm, window_size=window)

    said = said_by_ranks(3, call)
    assert len(set(said)) == 1
    lines = said[0].splitlines()
    assert lines[0] == (
        "DisagreementError: wrap_ring_attn_func: the ranks of the group do not agree"
    )
    assert lines[1].split() == ["rank", "mask"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2"]
    assert lines[2].split("24x24")[1] == lines[4].split("24x24")[1] != lines[3].split("24x24")[1]


def test_equal_layouts_agree_whatever_they_are_called() -> None:
    def call(comm: Any) -> None:
        ranges = [[(0, 8)], [(8, 16)]]
        layout = Layout.from_ranges(ranges) if comm.rank else Layout.contiguous(16, 2)
        wrap_ring_attn_func(Q, K, K, process_group=comm, layout=layout)

    assert said_by_ranks(2, call) == ["no error"] * 2


def test_layouts_that_differ_far_behind_do_not_agree() -> None:
    """Where their names, as messages have them, are the same."""

    def call(comm: Any) -> None:
        own = [(n, n + 1) for n in range(0, 96, 2)]
        rest = [(n, n + 1) for n in range(1, 96, 2)]
        if comm.rank:
            own[-1], rest[-1] = rest[-1], own[-1]
        q = torch.zeros(1, 48, 1, 4)
        wrap_ring_attn_func(q, q, q, process_group=comm, layout=Layout.from_ranges([own, rest]))

    first, second = said_by_ranks(2, call)
    assert first == second
    _, head, *rows = first.splitlines()[:4]
    assert head.split() == ["rank", "layout"]
    names = [re.sub("^  .  | #.*", "", row) for row in rows]
    assert names[0] == names[1] and "..." in names[0] and rows[0][3:] != rows[1][3:]


@pytest.mark.parametrize("said", [False, True])
def test_only_who_gave_no_layout_is_told_of_it(said: bool) -> None:
    def call(comm: Any) -> None:
        sizes = [8, 8] if comm.rank else [8, 9]
        q = torch.zeros(1, 8, 1, 4) if said or comm.rank else torch.zeros(1, 9, 1, 4)
        layout = Layout.from_sizes(sizes) if said else None
        wrap_ring_attn_func(q, q, q, process_group=comm, layout=layout)

    told = [each for each in said_by_ranks(2, call) if "do not agree" in each]
    assert told
    assert all(("without layout= each rank takes" in each) != said for each in told)


def test_seeds_of_their_own_say_where_they_are_from() -> None:
    def call(comm: Any) -> None:
        wrap_ring_attn_func(Q, K, K, process_group=comm, dropout_p=0.5, dropout_seed=comm.rank)

    for told in said_by_ranks(2, call):
        assert told.splitlines()[1].split() == ["rank", "dropout_seed"]
        assert told.endswith("seed that alike on all ranks, or pass dropout_seed=")


DIFFERENT_HEADS = """\
DisagreementError: wrap_ring_attn_func: the ranks of the group do not agree
  rank  q_heads
  0     part 0 of 2 of 4 heads
  1     part 1 of 2 of 4 heads"""


def test_parts_of_the_heads_that_differ(two_ranks: Pool) -> None:
    """Without the check the ranks would exchange keys of different heads: wrong, with no error."""
    assert two_ranks.run(op_jobs.heads_by_rank) == [DIFFERENT_HEADS] * 2


@pytest.mark.parametrize(
    ("column", "others"),
    [
        ("softcap", lambda rank: {"softcap": float(rank)}),
        ("softmax_scale", lambda rank: {"softmax_scale": 1.0 + rank}),
        ("dropout_seed", lambda rank: {"dropout_p": 0.5, "dropout_seed": rank}),
        ("dropout_p", lambda rank: {"dropout_p": 0.2 + 0.1 * rank, "dropout_seed": 1}),
        ("sink", lambda rank: {"sink": torch.zeros(4) if rank else None}),
        ("sink", lambda rank: {"sink": torch.zeros(4, dtype=[torch.float, torch.double][rank])}),
        ("alibi_slopes", lambda rank: {"alibi_slopes": torch.ones(*[2] * rank, 4)}),
        ("alibi_slopes", lambda rank: {"alibi_slopes": torch.ones(4) * (1 + rank)}),
        ("alibi_slopes", lambda rank: {"alibi_slopes": SLOPES.to([torch.float, BF16][rank])}),
        ("return_lse", lambda rank: {"return_lse": rank == 1}),
        ("kernel", lambda rank: {"kernel": "reference" if rank else "torch"}),
        ("deterministic", lambda rank: {"deterministic": rank == 1}),
        ("reduce_dtype", lambda rank: {"reduce_dtype": [None, BF16][rank]}),
        ("team_size", lambda rank: {"team_size": 1 + rank}),
        ("mask", lambda rank: {"mask": AttnMask.prefix_lm(16, 3 + rank)}),
        ("layout", lambda rank: {"layout": [Layout.zigzag, Layout.contiguous][rank](16, 2)}),
        ("k", lambda rank: {"k": K[:, :, : rank + 1]}),
        ("dtype", lambda rank: {"q": [Q, Q.double()][rank], "k": [K, K.double()][rank]}),
    ],
)
def test_whatever_ranks_disagree_on_is_in_the_table(column: str, others: Any) -> None:
    def call(comm: Any) -> None:
        comm.start = None  # nothing may be sent
        given = {"q": Q, "k": K, "mask": AttnMask.prefix_lm(16, 3), **others(comm.rank)}
        masked(**given, process_group=comm)

    first, second = said_by_ranks(2, call)
    assert first == second
    lines = first.splitlines()
    problem = "DisagreementError: wrap_masked_attn_func: the ranks of the group do not agree"
    assert lines[0] == problem
    assert lines[1].split()[0] == "rank" and column in lines[1].split()
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert lines[2].split()[1:] != lines[3].split()[1:]
