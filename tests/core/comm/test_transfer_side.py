"""What is put together for peers."""

from __future__ import annotations

import numpy as np
import torch

from customized_ops.ring_attention.core.comm.transfer_side import (
    ALIGNED_BYTES,
    ROWS,
    SMALL_BYTES,
    TransferSide,
    buffers,
    form,
)
from customized_ops.ring_attention.core.plan.exchanges.exchange import NO_RANGES, Exchange

SEND = [  # peer, first token, count
    *((1, 2, 3), (1, 7, 2)),
    *((2, 2, 3), (2, 7, 2)),
    *((3, 2, 3), (3, 8, 2)),
    *((4, 2, 3), (4, 7, 2)),
]


def messages(shares: tuple[tuple[int, int], ...]) -> dict[int, list[torch.Tensor]]:
    exchange = Exchange(np.array(SEND), NO_RANGES, NO_RANGES, 0)
    q = torch.arange(10 * 4.0).view(1, 10, 4, 1)
    side = TransferSide([q, -q], [ROWS._replace(shares=shares)] * 2, exchange.sent)
    found = side.messages((torch.float32, torch.float64), but=4)
    for peer, parts in found.items():
        rows = [token for p, first, n in SEND if p == peer for token in range(first, first + n)]
        heads = slice(*shares[peer % len(shares)]) if shares else slice(None)
        for part, whole, dtype in zip(parts, (q, -q), (torch.float32, torch.float64), strict=True):
            assert part.dtype == dtype
            assert torch.equal(part, whole[:, rows, heads].to(dtype).reshape(-1))
    assert sorted(found) == [1, 2, 3]
    return found


def message(shapes: list[list[int]], wires: list[torch.dtype]) -> tuple[list[int], list[int]]:
    """Sizes of the buffers of a message, and in which of them each part is."""
    flats, parts = buffers(torch.empty(0), form(tuple(map(tuple, shapes)), tuple(wires)))
    for part, shape, wire in zip(parts, shapes, wires, strict=True):
        assert list(part.shape) == shape and part.dtype == wire and part.is_contiguous()
        assert part.data_ptr() % ALIGNED_BYTES == 0 or not part.numel()
    owner = [flat.untyped_storage().data_ptr() for flat in flats]
    return [len(flat) for flat in flats], [
        owner.index(part.untyped_storage().data_ptr()) for part in parts
    ]


def test_small_parts_of_one_dtype_share_a_buffer() -> None:
    half, wide = torch.bfloat16, torch.float32
    assert message([[1, 3, 2, 4], [1, 3, 2, 5]], [half, half]) == ([24 + 30], [0, 0])
    assert message([[3, 3], [5], [2, 2]], [half, half, half]) == ([16 + 8 + 4], [0, 0, 0])
    assert message([[3], [5], [7]], [half, wide, half]) == ([8 + 7, 5], [0, 1, 0])
    large = SMALL_BYTES // 8
    assert message([[large], [large]], [wide, wide]) == ([2 * large], [0, 0])
    assert message([[large], [large + 1]], [wide, wide]) == ([large, large + 1], [0, 1])


def test_a_whole_tensor_is_sent_as_it_is() -> None:
    exchange = Exchange(np.array([(1, 2, 3)]), NO_RANGES, NO_RANGES, 0)
    q = torch.arange(10 * 4.0).view(1, 10, 4, 1)
    side = TransferSide([q], [ROWS], exchange.sent)
    ((part,),) = side.messages((torch.float32,), but=0).values()
    assert part.data_ptr() == q[:, 2:].data_ptr() and torch.equal(part, q[:, 2:5].flatten())


def test_peers_that_are_sent_the_same_tokens_share_a_copy() -> None:
    found = messages(())
    assert found[1][0] is found[2][0] and found[1][1] is found[2][1]
    assert found[1][0].data_ptr() != found[3][0].data_ptr()


def test_peers_with_other_heads_share_none() -> None:
    found = messages(((0, 3), (3, 4)))
    assert found[1][0].data_ptr() != found[2][0].data_ptr()


def test_lists_of_few_and_of_many_ranges_are_shared_alike() -> None:
    far = np.array([(peer, 2 * n, 1) for peer in (0, 1) for n in range(40)])
    for send in (np.array(SEND), far):
        first, second, *_ = Exchange(send, NO_RANGES, NO_RANGES, 0).sent.values()
        assert first is second
