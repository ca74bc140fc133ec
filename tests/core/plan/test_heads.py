import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.plan.heads import HeadShare, head_shares


@st.composite
def teams(draw) -> tuple[int, int, int]:
    """(query heads, key heads, ranks)"""
    kv_heads, group = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return kv_heads * group, kv_heads, draw(st.integers(1, kv_heads * group))


@given(teams())
@settings(deadline=None, derandomize=True, max_examples=300)
def test_every_query_head_once_beside_the_key_heads_that_it_reads(case):
    q_heads, kv_heads, team_size = case
    shares = head_shares(*case)
    assert len(shares) == team_size
    assigned = [q for share in shares for q in range(share.q_start, share.q_stop)]
    assert assigned == list(range(q_heads))
    for share in shares:
        assert share.q_heads > 0 and share.kv_heads > 0
        assert share.q_heads % share.kv_heads == 0
        for n in range(share.q_heads):
            reads = (share.q_start + n) // (q_heads // kv_heads)
            assert share.kv_start + n // (share.q_heads // share.kv_heads) == reads
    assert {kv for share in shares for kv in range(share.kv_start, share.kv_stop)} == set(
        range(kv_heads)
    )


@given(teams())
@settings(deadline=None, derandomize=True, max_examples=300)
def test_the_greatest_share_is_as_small_as_can_be(case):
    """Of shares that are whole groups of query heads, or parts of one group."""
    q_heads, kv_heads, team_size = case
    group = q_heads // kv_heads
    most = max(share.q_heads for share in head_shares(*case))

    def ranks_for(limit: int) -> int:
        """The fewest ranks that take all heads, at most ``limit`` each."""
        if limit >= group:
            return -(-kv_heads // (limit // group))
        return kv_heads * -(-group // limit)

    assert ranks_for(most) <= team_size
    assert most == 1 or ranks_for(most - 1) > team_size


@pytest.mark.parametrize(
    ("case", "want"),
    [
        ((8, 2, 2), [(0, 4, 0, 1), (4, 8, 1, 2)]),
        ((6, 3, 2), [(0, 2, 0, 1), (2, 6, 1, 3)]),
        ((5, 5, 3), [(0, 1, 0, 1), (1, 3, 1, 3), (3, 5, 3, 5)]),
        ((4, 1, 2), [(0, 2, 0, 1), (2, 4, 0, 1)]),
        ((6, 2, 3), [(0, 3, 0, 1), (3, 4, 1, 2), (4, 6, 1, 2)]),
    ],
)
def test_by_hand(case, want):
    assert head_shares(*case) == tuple(HeadShare(*share) for share in want)


def test_one_rank_has_whatever_there_is():
    assert head_shares(7, 3, 1) == (HeadShare(0, 7, 0, 3),)
    assert head_shares(0, 0, 1) == (HeadShare(0, 0, 0, 0),)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ((4, 2, 5), "team_size must be 1 to 4, the query heads, got 5"),
        ((4, 2, 0), "team_size must be 1 to 4, the query heads, got 0"),
        (
            (6, 4, 2),
            "query heads must be a multiple of key heads to be assigned to 2 ranks, got 6 and 4",
        ),
        (
            (6, 0, 2),
            "query heads must be a multiple of key heads to be assigned to 2 ranks, got 6 and 0",
        ),
    ],
)
def test_errors(case, message):
    with pytest.raises(ValueError) as info:
        head_shares(*case)
    assert str(info.value) == message
