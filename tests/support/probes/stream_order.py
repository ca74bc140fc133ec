"""Streams that are stand-ins: they know what they have done and waited for, and every torch op is
held against that. A CPU runs one thing after the other, so a wrong order never shows in results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from customized_ops.ring_attention.core.comm import Comm
from customized_ops.ring_attention.core.comm.pending import Pending
from customized_ops.ring_attention.core.comm.rank_group import Messages, Reduction
from customized_ops.ring_attention.core.kernels import KERNELS


class Race(AssertionError):
    """Something was used on a stream that had not waited for it."""


class Stream:
    """What a stream has done, or waited for: numbers of events."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.cuda_stream = id(self)

    def wait_event(self, event: Event) -> None:
        """As torch's."""
        self.seen |= event.seen


class Event:
    """What a stream had done when it was recorded."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def record(self, stream: Stream) -> None:
        """As torch's."""
        self.seen = set(stream.seen)


@dataclass
class Block:
    """Memory of one tensor, and of its views.

    Attributes:
        home: the stream it was allocated on: freed, it is at once given to that stream's next.
        written: the last write. used: all events of it.
    """

    home: Stream
    written: int
    used: set[int] = field(default_factory=set)


class Order(TorchDispatchMode):
    """Holds every op against what its stream has seen.

    Attributes:
        main, second: the streams. log: what else happened, in order, and on which stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.main, self.second = Stream(), Stream()
        self.now = self.main
        self.log: list[tuple[str, Stream]] = []
        self._blocks: dict[StorageWeakRef, Block] = {}
        self.gone: set[StorageWeakRef] = set()
        self._events = 0

    def note(self, what: str) -> int:
        """Something happens on the current stream."""
        self.log.append((what, self.now))
        return self._event()

    def uses(self, tensor: Tensor) -> set[int]:
        """All events of its memory, those to come too."""
        return self._blocks[StorageWeakRef(tensor.untyped_storage())].used

    def require(self, events: set[int], what: str) -> None:
        """Raise if the current stream has not seen them."""
        if not events <= self.now.seen:
            raise Race(what)

    def _event(self) -> int:
        self._events += 1
        self.now.seen.add(self._events)
        return self._events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = _memory([*args, *kwargs.values()])
        fresh = _memory([result]) - given
        schema = func._schema.arguments
        written = _memory(
            [
                kwargs.get(a.name, args[n] if n < len(args) else None)
                for n, a in enumerate(schema)
                if a.alias_info is not None and a.alias_info.is_write
            ]
        )
        view = any(r.alias_info is not None for r in func._schema.returns) and not written
        if fresh:
            self._reuse()
        if not view or fresh:
            self._op(str(func), given, written, fresh)
        return result

    def _op(
        self,
        name: str,
        given: set[StorageWeakRef],
        written: set[StorageWeakRef],
        fresh: set[StorageWeakRef],
    ) -> None:
        before = {key: self._blocks[key] for key in given if key in self._blocks}
        if given & self.gone:
            raise Race(f"{name} uses what peers sent, after the end")
        for key, block in before.items():
            self.require({block.written}, f"{name} reads what another stream may be writing")
            if key in written:
                self.require(block.used, f"{name} writes what another stream may be using")
        event = self._event()
        for key in given | fresh:
            block = before.get(key)
            if block is None:
                block = self._blocks[key] = Block(self.now, event)
            if key in written:
                block.written = event
            block.used.add(event)

    def _reuse(self) -> None:
        """A stream's next tensor may lie where one was that it had made and that is gone."""
        for key in [key for key in self._blocks if key.expired()]:
            self.gone.discard(key)
            if self._blocks[key].home is self.now:
                used = self._blocks.pop(key).used
                self.require(used, "memory is given away that another stream may be using")


def _memory(values: Any) -> set[StorageWeakRef]:
    tensors = (t for t in tree_leaves(values) if isinstance(t, Tensor) and t.numel())
    return {StorageWeakRef(t.untyped_storage()) for t in tensors}


class Unheard(Comm):
    """Rank 0 of a group whose peers send zeros: they arrive on the stream that waits for them."""

    def __init__(self, size: int, order: Order) -> None:
        super().__init__("unheard", 0, size)
        self._order = order
        self._begun: set[int] = set()
        self._under_way = 0
        self._arrived: list[tuple[StorageWeakRef, set[int]]] = []

    def begin(self, call: int) -> None:
        """See :meth:`Comm.begin`."""
        assert not self._begun, "a pass begins in another"
        self._begun = {self._order.note("begin")}

    def end(self) -> None:
        """See :meth:`Comm.end`."""
        assert not self._under_way, "the end, while messages are under way"
        for memory, uses in self._arrived:
            self._order.gone.add(memory)
            self._order.require(uses, "the end, while what peers sent may be in use")
        self._order.note("end")
        self._begun, self._arrived = set(), []

    def start(self, send: Messages, receive: Messages) -> Callable[[], None]:
        """See :meth:`Comm.start`."""
        assert self._begun, "a message outside of a pass"
        self._order.require(self._begun, "a message before the pass has begun")
        self._order.note("message")
        self._under_way += 1
        for messages in send.values():
            for message in messages:
                message.clone()
        buffers = [buffer for each in receive.values() for buffer in each]

        def finish() -> None:
            for buffer in buffers:
                buffer.zero_()
            self._here(buffers)
            self._under_way -= 1

        return finish

    def fetch(self, *args: Any) -> Pending:
        """See :meth:`Comm.fetch`; other Comms have peers write to what it returns."""
        coming = super().fetch(*args)

        def finish() -> list[Tensor]:
            buffers: list[Tensor] = coming.wait()
            self._here(buffers)
            return buffers

        return Pending(finish)

    def _here(self, buffers: Iterable[Tensor]) -> None:
        for buffer in buffers:
            if buffer.numel():
                memory = StorageWeakRef(buffer.untyped_storage())
                self._arrived.append((memory, self._order.uses(buffer)))

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`Comm.all_gather_object`."""
        raise AssertionError("not for the hot path")

    def combine(self, tensor: Tensor, how: Reduction) -> None:
        """See :meth:`Comm.all_reduce`."""
        raise AssertionError("attention reduces nothing over all ranks")


class Noted:
    """The reference kernel; notes each call."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def forward(self, *args: Any) -> Any:
        """See :class:`~.protocol.Kernel`."""
        self._order.note("kernel")
        return KERNELS["reference"].forward(*args)

    def backward(self, *args: Any, **options: Any) -> Any:
        """See :class:`~.protocol.Kernel`."""
        self._order.note("kernel")
        return KERNELS["reference"].backward(*args, **options)
