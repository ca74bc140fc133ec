"""A rank in its group: messages, sums, passes, and how peers learn of its errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from torch import Tensor

from ..plan.cost_model import H200
from .pending import Counters
from .signals.fingerprint import NO_CALL, Meeting

T = TypeVar("T")
Messages = dict[int, list[Tensor]]  # peer -> flat buffers, in order
Reduction = Literal["sum", "max"]
MOST_MEETINGS = 1024  # how many meetings are kept: a host may be far ahead of its GPU


class Moved(NamedTuple):
    """What a pass has done to its group.

    Attributes:
        sent_bytes, received_bytes: see :class:`~.pending.Counters`.
        at: how far it got in memory that peers write to.
        call: see :meth:`RankGroup.begin`.
    """

    sent_bytes: int
    received_bytes: int
    at: Any = None
    call: int = NO_CALL

    def since(self, before: Moved) -> Moved:
        """What has been done since ``before``."""
        sent, received = self.sent_bytes - before.sent_bytes, before.received_bytes
        return Moved(sent, self.received_bytes - received, self.at, self.call)


class RankGroup(ABC):
    """A group of ranks: this is rank ``rank`` of ``size``. In a graph ``name`` stands for the
    group; ``comm_by_name`` finds it again."""

    ahead = 1  # how many exchanges it pays to ask for before the first has arrived
    costs = H200  # by which plans over this group are chosen; the same on every rank
    two_streams = True  # whether what waits for peers may run on a stream of its own
    writes_to_peers = False  # whether a rank puts what it sends where its peers read it
    compares = False  # whether ranks compare their calls by default
    now = "an exchange"  # what the rank is doing, for errors and warnings
    step = 0  # the number of what it is doing

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.counters = Counters()
        # What it was doing when ranks last met, by number. All ranks count meetings alike, but not
        # steps: in some of these, nothing moves.
        self.meetings: dict[int, Meeting] = {}
        self._met, self._doing, self._call = 0, "", NO_CALL
        # Waits for messages of a tape's pass that are on their way, by what sent them.
        self.resent: dict[object, Callable[[], None]] = {}
        # Numbers of tokens that are known to have been the same on all ranks.
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

    @abstractmethod
    def combine(self, tensor: Tensor, how: Reduction) -> None:
        """The part of :meth:`all_reduce` that depends on how ranks are connected."""

    def all_reduce(self, tensor: Tensor, how: Reduction) -> Tensor:
        """Overwrite every rank's ``tensor``, of one shape and dtype, with the sum or the maximum of
        all, the same on every rank; returns it.

        Raises:
            ValueError: ``how`` is neither "sum" nor "max".
        """
        if how not in get_args(Reduction):
            raise ValueError(f"all_reduce: how must be 'sum' or 'max', got {how!r}")
        ring_bytes = 2 * tensor.nbytes * (self.size - 1) // self.size
        self.counters.sent_bytes += ring_bytes
        self.counters.received_bytes += ring_bytes
        self.combine(tensor, how)
        return tensor

    def meet(self, call: int = NO_CALL) -> None:
        """All ranks take part in what is next: a pass in which something moves, or a collective."""
        self._met += 1
        self.meetings[self._met] = Meeting(self._doing or "a collective", call)
        self.meetings.pop(self._met - MOST_MEETINGS, None)

    def begin(self, call: int) -> None:
        """Called before the first exchange of a forward or backward pass, on every rank or on none.
        ``call``: what ranks must agree on (:func:`.signals.fingerprint`)."""
        self._call = call

    def expect_messages(self) -> None:  # noqa: B027
        """Called on every rank before a pass whose exchanges all go by messages."""

    def end(self) -> None:  # noqa: B027
        """Called after the last use of what was received in the pass."""

    def leave(self) -> None:  # noqa: B027
        """Called once the pass has made its results, so that ranks are at the same step; not called
        after an error."""

    def replay_state(self) -> Hashable | None:
        """The state in which a pass would begin now. Passes that begin in equal states give the
        device the same work. None where a tape would not see all of it (:mod:`..tape`)."""
        return 0

    def owns(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all are in memory of the group that peers write to, the same in all passes that
        begin in equal states."""
        return not any(True for _ in tensors)

    def moved(self) -> Moved:
        """What all passes so far have done."""
        sent, received = self.counters.sent_bytes, self.counters.received_bytes
        return Moved(sent, received, call=self._call)

    def replay(self, moved: Moved, run: Callable[[], T]) -> T:
        """A pass in which ``run`` gives the device what a pass gives it from :meth:`begin` to
        :meth:`end`. Messages are sent anew, so these two are called here."""
        self.begin(moved.call)
        results = run()
        self.end()
        self.counters.sent_bytes += moved.sent_bytes
        self.counters.received_bytes += moved.received_bytes
        self.leave()
        return results

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Something that all ranks of the group do together. Peers are told of an error inside. If
        this rank's GPU was stopped, PeerFailed says why; its ``__context__`` is that error."""
        self.now, self.step = what, self.step + 1
        self.check()  # before anything uses a GPU, which may accept no more calls
        self._doing = what
        try:
            yield
        except BaseException as error:
            self.resent.clear()  # and with them their memory
            self.tell_failure(error)
            if isinstance(error, Exception):
                self.check_device()
            raise
        finally:
            self._doing = ""

    def check(self) -> None:
        """Raises for what is already known to be wrong, and of which peers need not be told: as
        :meth:`check_device`, and RuntimeError where the rank's last pass did not end."""
        self.check_device()

    def check_device(self) -> None:  # noqa: B027
        """Raises PeerFailed where waits of this rank's GPU have found a failure."""

    def tell_failure(self, error: BaseException) -> None:  # noqa: B027
        """Tell peers, who may wait for this rank, that what it was doing ended with ``error``."""

    def give_up(self, error: BaseException) -> None:
        """Tell peers that this rank sends and receives no more, though its program goes on."""
        self.tell_failure(error)

    def is_first(self, what: str) -> bool:
        """Whether no rank of the group has asked this about ``what`` before. It waits for no other
        rank. If several ask at the same time, it is true on one of them."""
        return True
