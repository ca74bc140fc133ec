"""Moving token ranges between the ranks of a group.

:class:`Comm` is what the executor uses; subclasses only know how to pass flat buffers between
peers. There is no global state, and ranks are always ranks in the group.

    fetch       each rank receives token ranges of its peers' tensors    (k, v; rows of q)
    send_home   the reverse: results for received tokens go home and are
                placed, added up or merged there                         (out, lse; dk, dv; dq)
    all_reduce  every rank gets the sum or the maximum of all ranks'     (statistics of a loss)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..merge.merge import accumulation_dtype
from ..plan.cost import H200
from ..plan.exchange import Exchange
from .pending import Counters, Pending
from .signals.fingerprint import NO_CALL, Meeting
from .transfer_side import Dims, Put, TransferSide, add, copy, place

T = TypeVar("T")
Messages = dict[int, list[Tensor]]  # peer -> flat buffers, in order
Reduction = Literal["sum", "max"]
Into = Sequence[Tensor] | Callable[[], Sequence[Tensor]]
SeenBy = Callable[[int], Exchange]
PeerParts = dict[int, Sequence[Tensor]]  # peer -> what came from it
Arrive = Callable[[], PeerParts]  # waits for the parts of all peers
MOST_MEETINGS = 1024  # whose names are kept: a host may be far ahead of its GPU


class Coming(NamedTuple):
    """A fetch that has started: what ``arrive`` returns is still to be put into what ``target``
    returns, which may be made then."""

    target: Callable[[], TransferSide]
    arrive: Arrive
    placed: Any = None


class Moved(NamedTuple):
    """What a pass has done to its Comm.

    Attributes:
        sent_bytes, received_bytes: see :class:`~.pending.Counters`.
        at: where it got to in memory that peers write to.
        call: see :meth:`Comm.begin`.
    """

    sent_bytes: int
    received_bytes: int
    at: Any = None
    call: int = NO_CALL

    def since(self, before: Moved) -> Moved:
        """From ``before`` on."""
        sent, received = self.sent_bytes - before.sent_bytes, before.received_bytes
        return Moved(sent, self.received_bytes - received, self.at, self.call)


class Comm(ABC):
    """A group of ranks that pass each other token ranges: this is rank ``rank`` of ``size``. In a
    graph ``name`` stands for the group; ``comm_by_name`` finds the Comm again."""

    ahead = 1  # how many exchanges it pays to ask for before the first has arrived
    costs = H200  # what plans over this group are chosen by; the same on every rank
    two_streams = True  # whether what waits for peers may run on a stream of its own
    writes_to_peers = False  # whether a rank puts what it sends where its peers read it
    compares = False  # whether ranks compare their calls by default
    now = "an exchange"  # what the rank is at, for errors and warnings
    step = 0  # counts what it has been at

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.counters = Counters()
        # What it was at when ranks last met, by number; unlike steps, in which nothing may move,
        # they are counted alike by all ranks.
        self.meetings: dict[int, Meeting] = {}
        self._met, self._doing = 0, ""
        # Numbers of tokens of which all ranks are known to have held the same.
        self.common_lengths: set[int] = set()

    @property
    def arena_bytes(self) -> int:
        """Bytes of memory that peers write to, used by the pass so far; no allocator counts it."""
        return 0

    @abstractmethod
    def start(self, send: Messages, receive: Messages) -> Callable[[], None]:
        """Begin passing buffers between peers, all at once; the returned function waits for them.

        Ranks that have something for one another call this in the same order with matching buffers.
        """

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order. For checks, not for the hot path."""

    @contextmanager
    def beside(self) -> Iterator[Comm]:
        """A Comm of the same ranks for objects alone, whose order is apart from that of this one's
        messages: ranks that are at different steps here still meet there. On every rank."""
        yield self

    @abstractmethod
    def combine(self, tensor: Tensor, how: Reduction) -> None:
        """The part of :meth:`all_reduce` that depends on how ranks are connected."""

    def all_reduce(self, tensor: Tensor, how: Reduction) -> Tensor:
        """Overwrite every rank's ``tensor``, of one shape and dtype, with the sum or the maximum of
        all, the same on every rank; returns it."""
        ring_bytes = 2 * tensor.nbytes * (self.size - 1) // self.size
        self.counters.sent_bytes += ring_bytes
        self.counters.received_bytes += ring_bytes
        self.combine(tensor, how)
        return tensor

    def meet(self, call: int = NO_CALL) -> None:
        """What comes next is of all ranks: a pass in which something moves, or a collective."""
        self._met += 1
        self.meetings[self._met] = Meeting(self._doing or "a collective", call)
        self.meetings.pop(self._met - MOST_MEETINGS, None)

    def begin(self, call: int) -> None:  # noqa: B027, most need not know
        """Before the first exchange of a forward or backward pass; on every rank, or on none.
        ``call``: what ranks must agree on (:func:`.signals.fingerprint`)."""

    def end(self) -> None:  # noqa: B027
        """After the last use of what was received in the pass."""

    def leave(self) -> None:  # noqa: B027
        """The pass made its results, so that ranks are at the same step; not called after an
        error."""

    def replay_state(self) -> Hashable | None:
        """Of a pass that would begin now: passes that are equal here reach the device alike. None
        where not all that a pass gives the device is seen (:mod:`..tape`)."""
        return None

    def moved(self) -> Moved:
        """By all passes so far."""
        return Moved(self.counters.sent_bytes, self.counters.received_bytes)

    def replay(self, moved: Any, run: Callable[[], T]) -> T:
        """A pass in which ``run`` does to the device what :meth:`begin` to :meth:`leave` did."""
        raise NotImplementedError

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Something that all ranks of the group do together; peers hear of an error inside."""
        self.now, self.step = what, self.step + 1
        self.check()  # before anything asks a GPU, which may take no more questions
        self._doing = what
        try:
            yield
        except BaseException as error:
            self.tell_failure(error)
            raise
        finally:
            self._doing = ""

    def check(self) -> None:  # noqa: B027
        """Raises what is known to be wrong already, which peers need not be told: PeerFailed where
        this rank's GPU has found a failure, RuntimeError where its last pass has no end."""

    def tell_failure(self, error: BaseException) -> None:  # noqa: B027
        """Tell peers, who may wait for this rank, that what it is at ended with ``error``."""

    def give_up(self, error: BaseException) -> None:
        """Tell peers that this rank sends and receives no more, though it goes on."""
        self.tell_failure(error)

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
            dims: of each, with the shares.
            seen_by: from a peer to the exchange as it is there; with it, and between :meth:`begin`
                and :meth:`end`, a Comm may write straight to where the peer reads.
        Returns:
            Pending list of tensors as ``tensors``, but with ``exchange.tokens`` tokens and this
            rank's share of the heads.
        """
        straight, target = self._fetch(exchange, tensors, dims, seen_by)
        if exchange.relay is None:
            return straight
        cross, spread = exchange.relay
        coming, _ = self._fetch(cross, tensors, dims)
        inside = [dim.of_share for dim in dims]
        last: list[Pending] = []

        def go_on() -> None:
            last.append(self._fetch(spread, coming.wait(), inside, into=target)[0])

        def finish() -> Sequence[Tensor]:
            last.pop().wait()
            return straight.wait()  # type: ignore[no-any-return]

        return Pending(finish, go_on=go_on)

    def _fetch(
        self,
        exchange: Exchange,
        tensors: Sequence[Tensor],
        dims: Sequence[Dims],
        seen_by: SeenBy | None = None,
        into: Callable[[], TransferSide] | None = None,
    ) -> tuple[Pending, Callable[[], TransferSide]]:
        """:meth:`fetch` without its relay, and what it fills: ``into`` if given."""
        source = TransferSide(tensors, dims, exchange.sent)
        target, arrive, placed = self._start_fetch(exchange, source, seen_by, into)

        def finish() -> Sequence[Tensor]:
            arrived, side = arrive(), target()
            if self.rank in exchange.sent:  # what the rank holds itself is part of the buffers
                copy(source.of(self.rank), side.of(self.rank))
            for peer, parts in sorted(arrived.items()):
                place(side.of(peer), parts)
            return side.tensors

        return Pending(finish, placed), target

    def _start_fetch(
        self,
        exchange: Exchange,
        source: TransferSide,
        seen_by: SeenBy | None,
        into: Callable[[], TransferSide] | None,
    ) -> Coming:
        """The part of :meth:`fetch` in which peers take part."""
        own = [dim.share_alone(self.rank) for dim in source.dims]

        @cache
        def target() -> TransferSide:
            buffers = (
                into().tensors
                if into is not None
                else [
                    tensor.new_empty(dim.shape(tensor, exchange.tokens, self.rank))
                    for tensor, dim in zip(source.tensors, own, strict=True)
                ]
            )
            return TransferSide(buffers, [dim.of_share for dim in own], exchange.received)

        wanted = TransferSide(source.tensors, own, exchange.received)
        return Coming(target, self._pass(source, wanted))

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
    ) -> Pending:
        """Send results for fetched tokens back to the tokens' owners.

        There ``put(places, parts)`` is called for each peer, with the tokens' places in ``into``
        and the results that arrived for them, in rank order, so that sums do not depend on timing.

        Args:
            results: of the rank's share of the heads.
            into: tensors of all of the rank's own tokens and heads, or a function that makes them
                once results are here, so that they may be sent before there is a place for them.
            dtype: that the results travel in; None sends them as they are, in dtypes that are the
                same on every rank. What a rank sends itself is not converted.
            seen_by: see :meth:`fetch`.
            over: a fetch of this pass whose tokens are not read from here on, so that what comes
                home may come into their memory; on every rank, or on none.
        """
        straight = self._send_home(exchange, results, into, dims, put, dtype, seen_by, over)
        if exchange.relay is None:
            return straight
        assert put is add, "results of relayed tokens are added up on their way"
        cross, spread = exchange.relay
        own = [dim.of_share for dim in dims]
        sums = [
            result.new_zeros(
                dim.shape(result, cross.tokens, self.rank), dtype=accumulation_dtype(result.dtype)
            )
            for result, dim in zip(results, own, strict=True)
        ]
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
    ) -> Pending:
        """:meth:`send_home` without the exchange's relay."""
        source = TransferSide(results, [dim.of_share for dim in dims], exchange.received)
        target = TransferSide(results, dims, exchange.sent)
        arrive = self._start_home(exchange, source, target, dtype, seen_by, over)
        # What the rank made for itself is left as it is.
        mine = {self.rank: source.take(self.rank)} if self.rank in exchange.sent else {}

        def finish() -> None:
            parts = arrive() | mine
            places = TransferSide(into() if callable(into) else into, dims, exchange.sent)
            for peer in sorted(parts):
                put(places.of(peer), parts[peer])

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
        """The part of :meth:`send_home` in which peers take part."""
        return self._pass(source, target, dtype)

    def _pass(
        self, source: TransferSide, target: TransferSide, dtype: torch.dtype | None = None
    ) -> Arrive:
        """The parts of all tensors at once, so that NCCL moves them in one kernel. Of ``target``
        only shapes count."""
        wires = [dtype or tensor.dtype for tensor in source.tensors]
        # A part that is one block of memory is sent without a copy.
        send = {
            p: [
                part.to(wire).reshape(-1).contiguous()
                for part, wire in zip(source.take(p, wires), wires, strict=True)
            ]
            for p in source.peers
            if p != self.rank
        }
        receive = {
            p: [
                source.tensors[n].new_empty(prod(target.shape(n, p)), dtype=wire)
                for n, wire in enumerate(wires)
            ]
            for p in target.peers
            if p != self.rank
        }
        self.counters.sent_bytes += sum(m.nbytes for each in send.values() for m in each)
        self.counters.received_bytes += sum(m.nbytes for each in receive.values() for m in each)
        wait = self.start(send, receive)

        def arrive() -> PeerParts:
            wait()
            return {
                p: [part.view(target.shape(n, p)) for n, part in enumerate(parts)]
                for p, parts in receive.items()
            }

        return arrive
