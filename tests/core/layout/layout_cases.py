"""What every layout must be."""

import itertools


def assert_every_token_is_held_once(layout):
    held = [layout.positions(r).tolist() for r in range(layout.group_size)]
    assert sorted(itertools.chain(*held)) == list(range(layout.total))
    assert layout.sizes == tuple(len(own) for own in held)
