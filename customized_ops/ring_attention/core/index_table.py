"""Tables of integers that kernels read: made on the host, and copied to devices.

All tables that a batch needs are copied together (:func:`send`), in one buffer, by one copy. The
host does not wait for it, and other streams of the device wait only when they read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from .arrays import Numbers

if TYPE_CHECKING:  # plans are made without torch
    import torch

ALIGNMENT = 16  # bytes: where a table starts in its buffer
# Up to this many bytes CUDA takes along with the launch of a copy, so they need not be pinned. If
# more are not, the host waits until the GPU has read them.
TAKEN_BYTES = 64 << 10


@dataclass(frozen=True, eq=False)
class IndexTable:
    """Integers on the host, and their copies on devices, each made once."""

    values: Numbers
    _on: dict[torch.device, tuple[torch.Tensor, Sent | None]] = field(
        default_factory=dict, repr=False
    )

    def on(self, device: torch.device) -> torch.Tensor:
        """The copy on a device, which the current stream may read."""
        if device not in self._on:
            send([self], device)
        tensor, sent = self._on[device]
        if sent is not None:
            sent.wait()
        return tensor

    def __reduce__(self) -> tuple[type[IndexTable], tuple[Numbers]]:
        return IndexTable, (self.values,)


class Sent:
    """A copy on its way to a GPU. A stream waits for it before it first reads it; the host never
    does."""

    def __init__(self, buffer: torch.Tensor) -> None:
        import torch

        self._buffer, stream = buffer, torch.cuda.current_stream(buffer.device)
        self._arrived, self._waited = stream.record_event(), {stream.cuda_stream}

    def wait(self) -> None:
        """Let the current stream wait for the copy, the first time that this stream asks."""
        import torch

        if torch.cuda.is_current_stream_capturing():
            # torch.cuda.graph waits for the device before it captures, so the copy is there. The
            # graph may read it for as long as the program runs.
            _of_graphs.add(self)
            return
        handle = torch._C._cuda_getCurrentRawStream(self._buffer.device.index)
        if handle in self._waited:
            return
        stream = torch.cuda.current_stream(self._buffer.device)
        stream.wait_event(self._arrived)  # later passes need not wait, so no tape does
        self._buffer.record_stream(stream)  # memory is not reused before it was read here
        self._waited.add(handle)


_of_graphs: set[Sent] = set()  # what captured CUDA graphs read, which is kept


def send(tables: Iterable[IndexTable], device: torch.device) -> None:
    """Copy the tables that are not on the device yet. The copies are never inference tensors, even
    in inference mode, because autograd may save them later.

    Raises:
        RuntimeError: a CUDA graph is being captured, which would copy them at each replay.
    """
    import torch

    if missing := dict.fromkeys(table for table in tables if device not in table._on):
        with torch.inference_mode(False):
            _send(list(missing), device)


def _send(missing: list[IndexTable], device: torch.device) -> None:
    import torch

    if device.type != "cuda":
        for table in missing:
            array = torch.from_numpy(np.ascontiguousarray(table.values))
            table._on[device] = array.to(device), None
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "seqshard: tables of indices must be on the GPU before a CUDA graph is captured; run "
            "two steps without one first"
        )
    if len(missing) == 1 and missing[0].values.nbytes <= TAKEN_BYTES:  # as of most new batches
        dense = torch.from_numpy(np.array(missing[0].values, order="C"))
        alone = dense.to(device, non_blocking=True)
        missing[0]._on[device] = alone, Sent(alone)
        return
    starts = [0]
    for table in missing:
        starts.append(starts[-1] + -(-table.values.nbytes // ALIGNMENT) * ALIGNMENT)
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=starts[-1] > TAKEN_BYTES)
    memory = host.numpy()
    for table, start in zip(missing, starts[:-1], strict=True):
        values = table.values
        np.ndarray(values.shape, values.dtype, memory, start)[...] = values
    buffer = host.to(device, non_blocking=True)  # torch keeps pinned memory until it was read
    sent = Sent(buffer)
    for table, start in zip(missing, starts[:-1], strict=True):
        values = table.values
        flat = buffer.narrow(0, start, values.nbytes).view(_dtype(values.dtype))
        table._on[device] = flat.view(values.shape), sent


@cache
def _dtype(dtype: np.dtype[np.number]) -> torch.dtype:
    """Torch's name of it."""
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype
