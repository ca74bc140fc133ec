"""What ranks that are threads of one process exchange by the tables of a plan."""

import time

import numpy as np
import pytest
import torch

from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.comm.transfer_side import ROWS, STATS, Dims, add, place
from customized_ops.ring_attention.core.plan.rank_plan import Exchange


def table(rows) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


# Rank 0 holds tokens 0 1 2 and gets 4 and a copy of its own 1; rank 1 holds 3 4 and gets 0 2.
EXCHANGES = [
    Exchange(
        send=table([(0, 1, 1), (1, 0, 1), (1, 2, 1)]),
        recv=table([(0, 0, 1), (1, 1, 1)]),
        places=table([(1, 2, 0), (4, 5, 1)]),
        tokens=2,
    ),
    Exchange(
        send=table([(0, 1, 1)]),
        recv=table([(0, 0, 1), (0, 1, 1)]),
        places=table([(0, 1, 0), (2, 3, 1)]),
        tokens=2,
    ),
]
HELD = [[0.0, 1.0, 2.0], [3.0, 4.0]]


def own_tokens(rank: int) -> torch.Tensor:
    """[batch 2, heads 1, tokens]: the second of the batch negative."""
    return torch.tensor([[HELD[rank]], [[-value for value in HELD[rank]]]])


def test_fetch():
    def body(comm):
        stats = own_tokens(comm.rank)
        rows = stats.transpose(1, 2).unsqueeze(-1)
        exchange = EXCHANGES[comm.rank]
        first, second = comm.fetch(exchange, [rows, stats], [ROWS, STATS]).wait()
        assert torch.equal(first.squeeze(-1).transpose(1, 2), second)
        return second[:, 0].tolist(), comm.counters.sent_bytes, comm.counters.received_bytes

    token = 2 * 2 * 4  # two tensors, a batch of two, fp32; the copy of rank 0's own is not counted
    assert run_ranks(2, body) == [
        ([[1.0, 4.0], [-1.0, -4.0]], 2 * token, token),
        ([[0.0, 2.0], [0.0, -2.0]], token, 2 * token),
    ]


def test_buffers_hold_the_tokens_that_places_say():
    """What is fetched, named by global index."""
    for exchange, want in zip(EXCHANGES, ([1, 4], [0, 2]), strict=True):
        assert exchange.indices.tolist() == want and not exchange.empty
    nothing = Exchange(table([]), table([]), table([]), 0)
    assert nothing.empty and nothing.indices.tolist() == []


def keep_larger(places, parts):
    """One rule for two tensors together: where the second is larger, take both."""
    (value, score), (new_value, new_score) = places.tensors, parts
    at = (..., slice(None) if places.rows is None else places.rows)
    value[at] = torch.where(new_score > score[at], new_value, value[at])
    score[at] = torch.maximum(new_score, score[at])


@pytest.mark.parametrize(
    ("put", "want"),
    [
        (place, [[10.0, 1.0, 20.0], [3.0, 2.0]]),
        (add, [[0.0 + 10.0, 1.0 + 1.0, 2.0 + 20.0], [3.0, 4.0 + 2.0]]),
    ],
)
def test_results_go_home(put, want):
    results = [torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[10.0, 20.0]]])]

    def body(comm):
        home = own_tokens(comm.rank)[:1].clone()
        exchange = EXCHANGES[comm.rank]
        comm.send_home(exchange, [results[comm.rank]], [home], [STATS], put).wait()
        return home[0, 0].tolist()

    assert run_ranks(2, body) == want


def test_results_of_several_tensors_go_home_together():
    """A put sees all of them, range by range: that is how (out, lse) are merged."""
    values = [torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[10.0, 20.0]]])]
    scores = [torch.tensor([[[9.0, -1.0]]]), torch.tensor([[[-9.0, 9.0]]])]

    def body(comm):
        value = own_tokens(comm.rank)[:1].clone()
        score = torch.zeros_like(value)
        results, into = [values[comm.rank], scores[comm.rank]], [value, score]
        comm.send_home(EXCHANGES[comm.rank], results, into, [STATS] * 2, keep_larger).wait()
        return value[0, 0].tolist(), score[0, 0].tolist()

    assert run_ranks(2, body) == [
        ([0.0, 1.0, 20.0], [0.0, 9.0, 9.0]),
        ([3.0, 4.0], [0.0, 0.0]),
    ]


# ------------------------------------------------------- shares of the heads

# A team of two: one computes a head of both ranks' tokens, the other three; one token a rank.
TEAM = [
    Exchange(table([(1, 0, 1)]), table([(1, 0, 1)]), table([(1, 2, 0)]), 1, team_size=2),
    Exchange(table([(0, 0, 1)]), table([(0, 0, 1)]), table([(0, 1, 0)]), 1, team_size=2),
]
HEADS = 4
SHARES = ((0, 1), (1, 4))
ROWS_OF_TEAM, STATS_OF_TEAM = (dims._replace(shares=SHARES) for dims in (ROWS, STATS))


def own_heads(rank: int, dims: Dims) -> torch.Tensor:
    """One token whose value in head h is 10 * rank + h."""
    shape = [1] * (4 if dims.tokens == ROWS.tokens else 3)
    shape[dims.heads] = HEADS
    return torch.arange(HEADS, dtype=torch.float64).view(shape) + 10 * rank


@pytest.mark.parametrize("dims", [ROWS_OF_TEAM, STATS_OF_TEAM], ids=["rows", "stats"])
def test_fetch_of_a_share_of_the_heads(dims):
    def body(comm):
        own = own_heads(comm.rank, dims)
        (got,) = comm.fetch(TEAM[comm.rank], [own], [dims]).wait()
        assert got.shape[dims.heads] == [1, 3][comm.rank]
        return got.flatten().tolist(), comm.counters.sent_bytes, comm.counters.received_bytes

    assert run_ranks(2, body) == [([10.0], 24, 8), ([1.0, 2.0, 3.0], 8, 24)]


@pytest.mark.parametrize("dims", [ROWS_OF_TEAM, STATS_OF_TEAM], ids=["rows", "stats"])
@pytest.mark.parametrize("put", [place, add])
def test_results_for_a_share_of_the_heads_go_home(dims, put):
    """Each rank's result is for the other's token, and touches its own share of the heads only."""

    def body(comm):
        home = own_heads(comm.rank, dims)
        result = torch.full_like(dims.share(home, comm.rank), 100.0)
        comm.send_home(TEAM[comm.rank], [result], [home], [dims], put).wait()
        return home.flatten().tolist()

    kept = 1 if put is add else 0
    assert run_ranks(2, body) == [
        [0.0, *(100.0 + kept * head for head in (1, 2, 3))],
        [100.0 + kept * 10, 11.0, 12.0, 13.0],
    ]


def test_results_add_up_in_rank_order_to_the_bit():
    """Three ranks send a part for rank 0's token; 1e16 absorbs a small one unless it comes last."""
    parts = [0.0, 1e16, -1e16, 1.0]
    exchanges = [Exchange(table([(p, 0, 1) for p in (1, 2, 3)]), table([]), table([]), 0)]
    exchanges += [Exchange(table([]), table([(0, 0, 1)]), table([(0, 1, 0)]), 1)] * 3

    def body(comm):
        time.sleep(0.01 * (comm.size - comm.rank))
        tokens = exchanges[comm.rank].tokens
        result = torch.full((1, 1, tokens), parts[comm.rank], dtype=torch.float64)
        home = torch.zeros(1, 1, 1 if comm.rank == 0 else 0, dtype=torch.float64)
        comm.send_home(exchanges[comm.rank], [result], [home], [STATS], add).wait()
        return home.sum().item()

    assert run_ranks(4, body)[0] == 1.0
