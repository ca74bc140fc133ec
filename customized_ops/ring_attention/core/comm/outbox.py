"""Messages on their way out: several that leave together, and those that a tape sends anew."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from weakref import ref

from torch import Tensor

from ..tape import launch, recording
from .rank_group import Messages, RankGroup


class Batch:
    """Messages that ranks pass one another at once.

    Whoever waits first for some of them waits for all, and nobody waits again. So all waits must be
    on one stream, or on streams of which the later one has waited for the earlier. A pass waits on
    its second stream, and after the two have joined, on the first.
    """

    def __init__(self, comm: RankGroup) -> None:
        self._comm = comm
        self._send, self._receive = Messages(), Messages()
        self._wait: Callable[[], None] | None = None
        self._left = False

    def add(self, send: Messages, receive: Messages) -> Callable[[], None]:
        """More messages; the returned function waits for them. See :meth:`.RankGroup.start`."""
        for every, some in ((self._send, send), (self._receive, receive)):
            for peer, messages in some.items():
                every.setdefault(peer, []).extend(messages)
        return self.wait

    def leave(self) -> None:
        """Start to pass what was added."""
        send, receive = self._send, self._receive
        self._send, self._receive = {}, {}  # whoever waits for one of them keeps no other
        if send or receive:
            comm = Resent(self._comm) if recording() else self._comm
            self._wait = comm.start(send, receive)
        self._left = True

    def wait(self) -> None:
        """Block until all is there (on a GPU: until the stream may use it)."""
        assert self._left, "messages are waited for before they have left"
        if self._wait is not None:
            self._wait()
        self._wait = None  # not before, as a wait may fail


class Resent:
    """Messages of a pass that is being recorded; its tape sends them anew. (A tape must not keep
    the group alive: it lives as long as the group.)"""

    def __init__(self, comm: RankGroup) -> None:
        self._comm = ref(comm)
        self._counts: list[dict[int, int]] = []

    def start(self, send: Messages, receive: Messages) -> Callable[[], None]:
        """See :meth:`.RankGroup.start`."""
        self._counts = [{peer: len(each) for peer, each in m.items()} for m in (send, receive)]
        every = [t for messages in (send, receive) for each in messages.values() for t in each]
        launch(Resent._begin, self, *every)
        return partial(launch, Resent._end, self, *every)  # the buffers live until then

    def _begin(self, *every: Tensor) -> None:
        rest = iter(every)
        send, receive = (
            {peer: list(islice(rest, count)) for peer, count in counts.items()}
            for counts in self._counts
        )
        comm = self._comm()
        assert comm is not None, "a pass is over a group"
        comm.resent[self] = comm.start(send, receive)

    def _end(self, *_: Tensor) -> None:
        comm = self._comm()
        assert comm is not None, "a pass is over a group"
        comm.resent.pop(self)()
