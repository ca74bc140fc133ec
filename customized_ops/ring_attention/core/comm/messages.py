"""Moving token ranges between the ranks of a group.

:class:`Comm` is what the executor uses; subclasses only know how to pass flat buffers between
peers. There is no global state, and ranks are always ranks in the group.

    fetch       each rank receives token ranges of its peers' tensors    (k, v; rows of q)
    send_home   the reverse: results for received tokens go home and are
                placed, added up or merged there                         (out, lse; dk, dv; dq)
    all_reduce  every rank gets the sum or the maximum of all ranks'     (statistics of a loss)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..merge.merge import accumulation_dtype
from ..plan.exchanges.exchange import Exchange
from ..tape import allocate
from .outbox import Batch
from .packing.parcels import Arrived, Parcels, put_all
from .pending import Pending
from .rank_group import RankGroup
from .transfer_side import Buffers, Dims, Put, TransferSide, add, copy, place

Into = Sequence[Tensor] | Callable[[], Sequence[Tensor]]
SeenBy = Callable[[int], Exchange]
Arrive = Callable[[], Arrived]  # waits for the parts of all peers


class Coming(NamedTuple):
    """A fetch that has started. What ``arrive`` returns must still be put into what ``target``
    returns, which may be allocated only then."""

    target: Callable[[], TransferSide]
    arrive: Arrive
    placed: Any = None


class Comm(RankGroup):
    """A group of ranks that pass each other token ranges."""

    _batch: Batch | None = None  # of the context :meth:`together`

    @contextmanager
    def together(self) -> Iterator[None]:
        """Messages that are passed in this context leave at its end, as one batch: a batch costs
        the host more than a message in it. Any two ranks pass each other the same exchanges in it,
        in the same order; inside it, ranks wait only for what left before."""
        if self._batch is not None:
            yield
            return
        self._batch = batch = Batch(self)
        try:
            yield
        finally:
            self._batch = None
        batch.leave()

    @contextmanager
    def beside(self) -> Iterator[Comm]:
        """A Comm of the same ranks for objects only. Its order of calls is independent of that of
        this one, so ranks that are at different steps here still meet there. On every rank."""
        yield self

    def fetch(
        self,
        exchange: Exchange,
        tensors: Sequence[Tensor],
        dims: Sequence[Dims],
        seen_by: SeenBy | None = None,
    ) -> Pending:
        """Receive tokens of each of ``tensors`` as the exchange says.

        Args:
            tensors: the rank's own, with all heads; a peer gets its share of them.
            dims: of each tensor, with the shares.
            seen_by: maps a peer to the exchange as the peer sees it. If given, between
                :meth:`begin` and :meth:`end` a Comm may write straight to where the peer reads.
        Returns:
            Pending list of tensors like ``tensors``, but with ``exchange.tokens`` tokens and this
            rank's share of the heads.
        """
        if exchange.relay is None:
            return self._fetch(exchange, tensors, dims, seen_by)[0]
        cross, spread = exchange.relay
        coming, _ = self._fetch(cross, tensors, dims)
        inside = [dim.of_share for dim in dims]
        last: list[Pending] = []

        def go_on() -> None:
            relayed = coming.wait()
            with self.together():
                straight, target = self._fetch(exchange, tensors, dims, seen_by)
                goes_on, _ = self._fetch(spread, relayed, inside, into=target)
            last.extend([straight, goes_on])

        def finish() -> Sequence[Tensor]:
            last.pop().wait()
            return last.pop().wait()  # type: ignore[no-any-return]

        return Pending(finish, go_on=go_on)

    def _fetch(
        self,
        exchange: Exchange,
        tensors: Sequence[Tensor],
        dims: Sequence[Dims],
        seen_by: SeenBy | None = None,
        into: Callable[[], TransferSide] | None = None,
    ) -> tuple[Pending, Callable[[], TransferSide]]:
        """:meth:`fetch` without its relay. Also returns what it fills: ``into`` if given."""
        source = TransferSide(tensors, dims, exchange.sent)
        target, arrive, placed = self._start_fetch(exchange, source, seen_by, into)

        def finish() -> Sequence[Tensor]:
            arrived = arrive()
            if into is not None and len(exchange.recv) == 0:
                return ()  # the other fetch may need no buffers of its own
            if arrived.in_place is None:
                side = target()
                put_all(place, side, arrived)
            else:
                shares = [dim.of_share for dim in dims]
                side = TransferSide(arrived.in_place, shares, exchange.received)
            if self.rank in exchange.sent:  # the buffers include tokens of its own
                copy(source.of(self.rank), side.of(self.rank))
            return side.tensors

        return Pending(finish, placed), target

    def _start_fetch(
        self,
        exchange: Exchange,
        source: TransferSide,
        seen_by: SeenBy | None,
        into: Callable[[], TransferSide] | None,
    ) -> Coming:
        """The part of :meth:`fetch` that involves peers."""
        own = [dim.share_alone(self.rank) for dim in source.dims]
        wanted = TransferSide(source.tensors, own, exchange.received)
        target = Buffers(wanted, exchange.tokens, self.rank, into)
        whole = exchange.tokens if into is None else None  # others fill the buffers, too
        return Coming(target, self._pass(source, wanted, whole=whole))

    def send_home(
        self,
        exchange: Exchange,
        results: Sequence[Tensor],
        into: Into,
        dims: Sequence[Dims],
        put: Put,
        dtype: torch.dtype | None = None,
        seen_by: SeenBy | None = None,
        over: Pending | None = None,
        keeps: bool = False,
    ) -> Pending:
        """Send results for fetched tokens back to the tokens' owners.

        An owner calls ``put(places, parts)`` with the tokens' places in ``into`` and the results
        that arrived for them, for each peer or, where that gives the same, for several at once.
        The rank's own come first, then those of peers that sent small messages, then those of
        others, both in rank order, so that sums do not depend on timing.

        Args:
            results: of the rank's share of the heads.
            into: tensors of all of the rank's own tokens and heads, or a function that makes them
                once results are here, so that results may be sent before they have a place.
            dtype: in which results travel; None sends them as they are, in dtypes that are the
                same on every rank. What a rank sends itself is not converted.
            seen_by: see :meth:`fetch`.
            over: a fetch of this pass whose tokens are not read any more, so that what comes home
                may be written over them; on every rank, or on none.
            keeps: whether the rank has put its own where they belong.
        """
        given = exchange, results, into, dims, put, dtype, seen_by, over, keeps
        if exchange.relay is None:
            return self._send_home(*given)
        assert put is add, "results of relayed tokens are added up on their way"
        cross, spread = exchange.relay
        own = [dim.of_share for dim in dims]
        sums = [
            allocate(
                result.new_zeros,
                dim.shape(result, cross.tokens, self.rank),
                dtype=accumulation_dtype(result.dtype),
            )
            for result, dim in zip(results, own, strict=True)
        ]
        with self.together():
            straight = self._send_home(*given)
            near = self._send_home(spread, results, sums, own, add, dtype)
        last: list[Pending] = []

        def go_on() -> None:
            near.wait()
            last.append(self._send_home(cross, sums, into, dims, add, dtype or results[0].dtype))

        def finish() -> None:
            straight.wait()
            last.pop().wait()

        return Pending(finish, go_on=go_on)

    def _send_home(
        self,
        exchange: Exchange,
        results: Sequence[Tensor],
        into: Into,
        dims: Sequence[Dims],
        put: Put,
        dtype: torch.dtype | None,
        seen_by: SeenBy | None = None,
        over: Pending | None = None,
        keeps: bool = False,
    ) -> Pending:
        """:meth:`send_home` without the exchange's relay."""
        source = TransferSide(results, [dim.of_share for dim in dims], exchange.received)
        target = TransferSide(results, dims, exchange.sent)
        arrive = self._start_home(exchange, source, target, dtype, seen_by, over)
        # What the rank made for itself is left as it is.
        mine = source.take(self.rank) if self.rank in exchange.sent and not keeps else None

        def finish() -> None:
            arrived = arrive()
            if mine is None and not (arrived.lists or arrived.alone):
                return
            places = TransferSide(into() if callable(into) else into, dims, exchange.sent)
            if mine is not None:
                put(places.of(self.rank), mine)
            put_all(put, places, arrived)

        return Pending(finish)

    def _start_home(
        self,
        exchange: Exchange,
        source: TransferSide,
        target: TransferSide,
        dtype: torch.dtype | None,
        seen_by: SeenBy | None,
        over: Pending | None,
    ) -> Arrive:
        """The part of :meth:`send_home` that involves peers."""
        return self._pass(source, target, dtype)

    def _pass(
        self,
        source: TransferSide,
        target: TransferSide,
        dtype: torch.dtype | None = None,
        whole: int | None = None,
    ) -> Arrive:
        """Pass the parts of all tensors at once, so that NCCL moves them in one kernel. Of
        ``target`` only the shapes matter. For ``whole`` see :meth:`.Parcels.empty`."""
        wires = tuple([dtype or tensor.dtype for tensor in source.tensors])
        out, into = Parcels(source, wires, self.rank), Parcels(target, wires, self.rank)
        if out.nbytes == into.nbytes == 0:  # nothing to wait for, whatever else is in a batch
            return partial(Arrived, [], {})
        send, (receive, arrived) = out.pack(), into.empty(source.tensors[0], whole)
        self.counters.sent_bytes += out.nbytes
        self.counters.received_bytes += into.nbytes
        batch = self._batch or Batch(self)
        wait = batch.add(send, receive)
        if self._batch is None:
            batch.leave()

        def arrive() -> Arrived:
            wait()
            return arrived

        return arrive
