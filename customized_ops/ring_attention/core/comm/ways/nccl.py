"""NCCL's own functions, called on the communicator of a torch process group.

Messages that torch passes cost the host two to three times as much
(``examples/benchmark/parts/message_time.py``). The group stays what connects ranks and what ends
messages that are stuck. Torch does not notice that a message never comes: whoever uses this watches
it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

LIBRARY = "libnccl.so.2"
UINT8 = 1  # ncclUint8: messages are bytes


# Whether it is sent; a message, flat; and the rank of the group that it goes to, or comes from.
Operation = tuple[bool, Tensor, int]


class Nccl(NamedTuple):
    """Functions of the library: of ``ncclGroupStart`` and so on."""

    group_start: Callable[[], int]
    group_end: Callable[[], int]
    send: Callable[..., int]
    receive: Callable[..., int]
    error_string: Callable[[int], bytes]

    def check(self, result: int) -> None:
        """Raises DistBackendError for an ``ncclResult_t`` other than success."""
        if result:
            raise dist.DistBackendError(f"NCCL: {self.error_string(result).decode()}")


class Queue:
    """Passes messages of one group, in order, on a CUDA stream. The stream has priority: messages
    start before kernels that wait for a place on the same GPU.

    Attributes:
        kept: messages for which nobody has waited. After an error they may still arrive.
    """

    def __init__(self, library: Nccl, backend: Any, device: torch.device) -> None:
        self.library, self.device = library, device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.kept: dict[Queued, list[Operation]] = {}
        self._backend = backend

    @classmethod
    def of(cls, backend: Any, device: torch.device) -> Queue | None:
        """The queue of a connected group's ``ProcessGroupNCCL``; None where torch does not tell the
        communicator or there is no :func:`nccl`. Its peers need not have one."""
        library = nccl()
        known = library is not None and getattr(backend, "_comm_ptr", int)()
        return cls(library, backend, device) if library is not None and known else None

    def call(self, operations: list[Operation]) -> None:
        """Call NCCL for these, inside a group of its operations.

        Raises:
            DistBackendError: the group was aborted, or NCCL reports an error.
        """
        communicator, stream = self._backend._comm_ptr(), self.stream.cuda_stream
        if not communicator:
            raise dist.DistBackendError("NCCL: the group of these messages was destroyed")
        receive_or_send = self.library.receive, self.library.send
        for sends, message, place in operations:
            given = message.data_ptr(), message.nbytes, UINT8, place, communicator, stream
            if result := receive_or_send[sends](*given):
                self.library.check(result)

    def forget(self) -> None:
        """Free messages of passes that ended in an error, once they have been passed."""
        for queued in [each for each in self.kept if each.done.query()]:
            del self.kept[queued]


class Queued:
    """Messages of a queue; ``done``: when it has passed them."""

    done: torch.cuda.Event

    def __init__(self, queue: Queue, operations: list[Operation]) -> None:
        self._queue = queue
        queue.kept[self] = operations

    def wait(self) -> None:
        """Let the current stream wait for them."""
        _current_stream(self._queue.device).wait_event(self.done)
        self._queue.kept.pop(self, None)


def together(every: Sequence[tuple[Queue, list[Operation]]]) -> list[Queued]:
    """Pass messages of several queues of one device, after what its current stream was given.
    Raises as :meth:`Queue.call`."""
    if not every:
        return []
    library, device = every[0][0].library, every[0][0].device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return together(every)
    given = _current_stream(device).record_event()
    queued = []
    library.check(library.group_start())
    try:
        for queue, operations in every:
            queue.stream.wait_event(given)
            queued.append(Queued(queue, operations))
            queue.call(operations)
    finally:  # what was called before an error is passed all the same
        result = library.group_end()
        for (queue, _), each in zip(every, queued, strict=False):
            each.done = queue.stream.record_event()
    library.check(result)
    return queued


def _current_stream(device: torch.device) -> torch.cuda.Stream:
    """``torch.cuda.current_stream(device)``, which takes much longer."""
    stream_id, index, kind = torch._C._cuda_getCurrentStream(device.index)
    return torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind)


@cache
def nccl() -> Nccl | None:
    """The functions of the library that torch itself has loaded; None where there is no such one,
    because torch's NCCL is linked in, or has another name."""
    if not dist.is_nccl_available():
        return None
    loaded = os.RTLD_NOW | os.RTLD_NOLOAD
    try:
        # Whatever waits for peers lets other threads go on: a group's end, at its first message.
        quick, waits = ctypes.PyDLL(LIBRARY, loaded), ctypes.CDLL(LIBRARY, loaded)
    except OSError:
        return None
    version = c_int()
    quick.ncclGetVersion(ctypes.byref(version))
    if version.value != version_number(torch.cuda.nccl.version()):
        return None
    arguments = c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p
    return Nccl(
        _function(quick, "ncclGroupStart"),
        _function(waits, "ncclGroupEnd"),
        _function(quick, "ncclSend", *arguments),
        _function(quick, "ncclRecv", *arguments),
        _function(quick, "ncclGetErrorString", c_int, returns=c_char_p),
    )


def version_number(version: tuple[int, ...]) -> int:
    """What ``ncclGetVersion`` gives for (major, minor, patch), from 2.9 on."""
    major, minor, patch = version[:3]
    return major * 10000 + minor * 100 + patch


def _function(library: ctypes.CDLL, name: str, *arguments: Any, returns: Any = c_int) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, returns
    return function
