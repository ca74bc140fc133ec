"""What is packed for peers, and put where it goes."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from customized_ops.ring_attention.core.comm.packing import forms
from customized_ops.ring_attention.core.comm.packing.forms import Form, form_of
from customized_ops.ring_attention.core.comm.packing.parcels import Parcels, put_all
from customized_ops.ring_attention.core.comm.transfer_side import (
    ROWS,
    STATS,
    TransferSide,
    add,
    place,
)
from customized_ops.ring_attention.core.plan.exchanges.exchange import NO_RANGES, Exchange

SEND = [  # peer, first token, count
    *((1, 2, 3), (1, 7, 2)),
    *((2, 2, 3), (2, 7, 2)),
    *((3, 2, 3), (3, 8, 2)),
    *((4, 2, 3), (4, 7, 2)),
    (5, 0, 10),
]
RANK = 4
TWO = ((0, 3), (3, 4))  # shares of the heads
WIRES = (torch.float32, torch.float64, torch.float32)


def side_of(shares: tuple[tuple[int, int], ...], batch: int = 1) -> TransferSide:
    """Rows of two tensors and their statistics."""
    team = len(shares) or 1
    exchange = Exchange(np.array(SEND), NO_RANGES, NO_RANGES, 0, team)
    q = torch.arange(batch * 10 * 4 * 2.0).view(batch, 10, 4, 2)
    dims = [dim._replace(shares=shares) for dim in (ROWS, ROWS, STATS)]
    return TransferSide([q, -q, q[..., 0].transpose(1, 2).contiguous()], dims, exchange.sent)


def tokens_of(peer: int) -> list[int]:
    return [token for p, first, n in SEND if p == peer for token in range(first, first + n)]


@pytest.mark.parametrize("large", [0, 3, 100], ids=["all alone", "one alone", "together"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("shares", [(), TWO], ids=["all heads", "shares"])
def test_what_is_packed_arrives(
    shares: tuple[tuple[int, int], ...], batch: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each peer's message is what that peer expects; here it comes back."""
    row = 4 * 2 * batch * (4 + 8) + 4 * 4 * batch
    monkeypatch.setattr(forms, "SMALL_BYTES", 2 * row * large)
    side = side_of(shares, batch)
    out = Parcels(side, WIRES, RANK)
    sent = out.pack()
    received, arrived = Parcels(side, WIRES, RANK).empty(side.tensors[0])
    assert sorted(sent) == sorted(received) == [1, 2, 3, 5]
    for peer, messages in sent.items():
        for message, place_ in zip(messages, received[peer], strict=True):
            assert message.dtype == place_.dtype and message.shape == place_.shape
            assert message.is_contiguous() and place_.is_contiguous()
            place_.copy_(message)
    count = sum(len(tokens_of(p)) * (row if not shares else 0) for p in sent)
    if not shares:
        assert out.nbytes == count
    for put in (place, add):
        home = TransferSide([torch.zeros_like(t) for t in side.tensors], side.dims, side.peers)
        put_all(put, home, arrived)
        for total, t, dim in zip(home.tensors, side.tensors, side.dims, strict=True):
            want = torch.zeros_like(t)
            for peer in sent:
                heads = slice(*shares[peer % 2]) if shares else slice(None)
                at = [slice(None)] * t.dim()
                at[dim.tokens], at[dim.heads] = torch.tensor(tokens_of(peer)), heads
                want[tuple(at)] = t[tuple(at)] + (want[tuple(at)] if put is add else 0)
            assert torch.equal(total, want)


def form_of_one(shapes: list[tuple[int, ...]], wires: tuple[torch.dtype, ...]) -> Form:
    """Of tensors whose tokens are dim 1, for a peer with 2 tokens and one with 3."""
    exchange = Exchange(np.array([(1, 0, 2), (2, 2, 3)]), NO_RANGES, NO_RANGES, 0)
    dims = [STATS._replace(tokens=1)] * len(shapes)
    return form_of(TransferSide([torch.zeros(s) for s in shapes], dims, exchange.sent), wires, 0)


def buffers(shapes: list[tuple[int, ...]], wires: tuple[torch.dtype, ...]) -> list[list[int]]:
    """Which tensors are in each buffer, and how many elements of each peer."""
    [form] = form_of_one(shapes, wires).apart
    return [[*(part.number for part in each.parts), *each.pieces] for each in form.buffers]


def test_tensors_of_one_dtype_share_a_row() -> None:
    half, wide = torch.bfloat16, torch.float32
    assert buffers([(1, 5, 2, 4), (1, 5, 2, 5)], (half, half)) == [[0, 1, 2 * 18, 3 * 18]]
    three = buffers([(1, 5, 3), (1, 5, 5), (1, 5, 7)], (half, wide, half))
    assert three == [[0, 2, 2 * 10, 3 * 10], [1, 2 * 5, 3 * 5]]
    form = form_of_one([(2, 5, 3, 4), (2, 5, 3, 6)], (half, half))
    assert form.nbytes == 5 * 2 * 2 * 3 * (4 + 6)
    [buffer] = form.apart[0].buffers
    assert [part[2:] for part in buffer.parts] == [((12, 60, 4, 1), 0), ((18, 60, 6, 1), 24)]


def test_a_form_is_worked_out_once_for_tensors_that_look_the_same() -> None:
    side = side_of(())
    found = form_of(side, WIRES, RANK)
    again = TransferSide([t.clone() for t in side.tensors], list(side.dims), side.peers)
    assert form_of(again, WIRES, RANK) is found
    dims = [dim._replace(shares=TWO) for dim in side.dims]
    for changed, wires, rank in (
        (side, WIRES, 0),
        (side, (torch.float32,) * 3, RANK),
        (TransferSide(side.tensors, dims, side.peers), WIRES, RANK),
    ):
        assert form_of(changed, wires, rank) is not found
    other = [*side.tensors[:2], side.tensors[2].expand(2, -1, -1)]
    assert form_of(TransferSide(other, side.dims, side.peers), WIRES, RANK) is not found


@pytest.mark.parametrize(
    ("received", "in_place"),
    [
        ([(0, 0, 2), (1, 2, 3)], 5),
        ([(0, 0, 2), (1, 2, 3), (RANK, 5, 4)], 9),  # its own come last
        ([(0, 0, 2), (RANK, 2, 4), (1, 6, 3)], None),  # in between
        ([(0, 0, 2), (1, 2, 3), (RANK, 6, 4)], None),  # after a gap
        ([(0, 2, 2), (1, 0, 2)], None),
        ([(0, 1, 2), (1, 3, 2)], None),
    ],
)
def test_tokens_that_arrive_in_order_stay_where_they_are(
    received: list[tuple[int, int, int]], in_place: int | None
) -> None:
    """With room for the rank's own after them, which no message fills."""
    exchange = Exchange(NO_RANGES, np.array(received), NO_RANGES, 9)
    side = TransferSide([torch.zeros(1, 9, 2, 4)] * 2, [ROWS] * 2, exchange.received)
    for whole in (5, 9, None):
        messages, arrived = Parcels(side, (torch.float32,) * 2, RANK).empty(side.tensors[0], whole)
        assert sum(m.numel() for each in messages.values() for m in each) == 2 * 8 * sum(
            count for peer, _, count in received if peer != RANK
        )
        assert (arrived.in_place is not None) == (in_place is not None and whole == in_place)
        if arrived.in_place is not None:
            for [message] in messages.values():
                message.fill_(1)
            for part in arrived.in_place:
                assert part.shape[1] == whole and (part[:, :5] == 1).all()


def test_a_large_tensor_that_is_one_block_is_sent_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "SMALL_BYTES", 0)
    exchange = Exchange(np.array([(1, 2, 3)]), NO_RANGES, NO_RANGES, 0)
    q = torch.arange(10 * 4.0).view(1, 10, 4, 1)
    side = TransferSide([q], [ROWS], exchange.sent)
    ((part,),) = Parcels(side, (torch.float32,), 0).pack().values()
    assert part.data_ptr() == q[:, 2:].data_ptr() and torch.equal(part, q[:, 2:5].flatten())


@pytest.mark.parametrize("small", [0, 1 << 20])
@pytest.mark.parametrize(("shares", "shared"), [((), True), (TWO, False)])
def test_peers_that_are_sent_the_same_tokens_and_heads_share_a_message(
    shares: tuple[tuple[int, int], ...], shared: bool, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "SMALL_BYTES", small)
    found = Parcels(side_of(shares), WIRES, RANK).pack()
    for one, other in zip(found[1], found[2], strict=True):
        assert (one.data_ptr() == other.data_ptr()) == shared
    assert found[1][0].data_ptr() != found[3][0].data_ptr()


def test_lists_of_few_and_of_many_ranges_are_shared_alike() -> None:
    far = np.array([(peer, 2 * n, 1) for peer in (0, 1) for n in range(40)])
    for send in (np.array(SEND), far):
        first, second, *_ = Exchange(send, NO_RANGES, NO_RANGES, 0).sent.values()
        assert first is second


def test_forms_do_not_keep_what_they_are_of() -> None:
    """Tables on a device are freed with their plan, not when garbage is collected."""
    side = side_of(())
    Parcels(side, WIRES, RANK).pack()
    Parcels(side, WIRES, RANK).empty(side.tensors[0])
    gone = weakref.ref(next(iter(side.peers.values())))
    gc.disable()
    try:
        del side
        assert gone() is None
    finally:
        gc.enable()
