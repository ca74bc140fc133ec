from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from customized_ops.ring_attention.core.merge.merge import RowCoverage

LENGTH = 12
RANGE = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted)


@settings(deadline=None, derandomize=True)
@given(st.lists(RANGE, max_size=6))
def test_pieces_are_the_range_row_by_row(ranges):
    rows, seen = RowCoverage(), set()
    for start, stop in ranges:
        pieces = rows.add(start, stop)
        assert [n for first, last, _ in pieces for n in range(first, last)] == [*range(start, stop)]
        for first, last, again in pieces:
            assert first < last
            assert {n in seen for n in range(first, last)} == {again}
        assert all(a[2] != b[2] for a, b in pairwise(pieces)), "as few pieces as can be"
        seen |= {*range(start, stop)}
    left = {n for first, last, _ in rows.rest(LENGTH) for n in range(first, last)}
    assert left == {*range(LENGTH)} - seen
    assert rows.rest(LENGTH) == []
