"""Dropout's random numbers: the published generator, placed by global indices alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotations.philox import philox
from customized_ops.ring_attention.core.kernels.protocol.scoring import keep

# counter, key, words: Random123's known answers for philox4x32-10
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def seeded(seed):
    return torch.tensor([seed], dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    got = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [word.item() for word in got] == words


def in_python(counter, key):
    """The same generator in Python's unbounded integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b % 2**32, a >> 32 ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


words_32 = st.integers(0, 2**32 - 1)


@given(st.tuples(*[words_32] * 4), st.tuples(*[words_32] * 2))
@settings(deadline=None, derandomize=True)
def test_products_keep_all_64_bits(counter, key):
    got = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(word.item() for word in got) == in_python(counter, key)


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**63 - 1, -1, -(2**63)])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_each_place_has_its_own_word(seed, p):
    rows, keys = [0, 7, 2**20, 2**32 - 1], [3, 2**31]
    got = keep(seeded(seed), p, torch.tensor(rows), torch.tensor(keys), 3, 6, 10, 2)
    assert got.shape == (2, 6, 4, 2) and got.dtype == torch.bool
    key = seed % 2**32, seed // 2**32 % 2**32
    want = [
        [
            [
                [in_python((i, j, h // 4, b), key)[h % 4] >= round(p * 2**32) for j in keys]
                for i in rows
            ]
            for h in range(3, 9)
        ]
        for b in (10, 11)
    ]
    assert got.tolist() == want


@pytest.mark.parametrize("head", range(4))
def test_threshold_to_the_bit(head):
    word = KNOWN[0][2][head]
    origin = torch.zeros(1, dtype=torch.int64)
    assert keep(seeded(0), word / 2**32, origin, origin, head, 1, 0, 1).item()
    assert not keep(seeded(0), (word + 1) / 2**32, origin, origin, head, 1, 0, 1).item()


places = st.tuples(st.integers(0, 5), st.integers(1, 6))


@given(places, places, places, places)
@settings(deadline=None, derandomize=True)
def test_a_part_is_a_part_of_the_whole(batch, heads, rows, keys):
    whole = keep(seeded(9), 0.4, torch.arange(11), torch.arange(11), 0, 11, 0, 11)
    i, j = (torch.arange(first, first + count) for first, count in (rows, keys))
    part = keep(seeded(9), 0.4, i, j, *heads, *batch)
    b, h = (slice(first, first + count) for first, count in (batch, heads))
    assert torch.equal(part, whole[b, h][:, :, i][..., j])


def test_order_of_rows_and_keys():
    rows, keys = torch.tensor([5, 2, 9]), torch.tensor([4, 0])
    whole = keep(seeded(9), 0.4, torch.arange(10), torch.arange(5), 0, 2, 0, 1)
    part = keep(seeded(9), 0.4, rows, keys, 0, 2, 0, 1)
    assert torch.equal(part, whole[:, :, rows][..., keys])


def assert_rate(name, hits, rate):
    """Within five standard deviations of a binomial share."""
    error = hits.double().mean().item() - rate
    sigma = math.sqrt(rate * (1 - rate) / hits.numel())
    assert abs(error) <= 5 * sigma, f"{name}: off by {error / sigma:.1f} standard deviations"


def test_assert_rate_fails():
    with pytest.raises(AssertionError, match=r"x: off by 10\.0 standard deviations"):
        assert_rate("x", torch.arange(10_000) < 5500, 0.5)


def sample(seed, p):
    return keep(seeded(seed), p, torch.arange(128), torch.arange(128), 0, 8, 0, 4)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_rate(p):
    kept = sample(0, p)
    assert_rate("all", kept, 1 - p)
    for head in range(8):
        assert_rate(f"head {head}", kept[:, head], 1 - p)


@pytest.mark.parametrize("p", [0.0, 1e-11])
def test_no_rate_keeps_all(p):
    assert sample(0, p).all()


@pytest.mark.parametrize("distance", [1, 2, 4, 64])
def test_neighbours_are_independent(distance):
    """Two fair coins agree half of the time."""
    kept = sample(0, 0.5)
    for dim, name in enumerate(("batch", "heads", "rows", "keys")):
        if distance < kept.shape[dim]:
            near, far = kept.narrow(dim, 0, kept.shape[dim] - distance), kept.roll(-distance, dim)
            assert_rate(name, near == far.narrow(dim, 0, near.shape[dim]), 0.5)


@pytest.mark.parametrize("other", [1, 2**32, -1])
def test_seeds_are_independent(other):
    assert_rate("seeds", sample(0, 0.5) == sample(other, 0.5), 0.5)


@pytest.mark.gpu
def test_bits_are_the_same_on_a_gpu():
    on_gpu = keep(seeded(7), 0.5, *(torch.arange(128, device="cuda") for _ in "ij"), 0, 8, 0, 4)
    assert torch.equal(on_gpu.cpu(), sample(7, 0.5))
