"""What tells apart calls that a tape does not serve alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ...kernels import Kernel, Scoring
from ...tape import memory

Given = Sequence[Tensor | None]


def key_of(kernel: Kernel, scoring: Scoring, given: Given) -> list[Hashable]:
    """Everything that tells a call apart but the data of its tensors: their shapes, strides and
    dtypes, whether their memory is aligned to 16 bytes, how they share memory, the stream, and
    autocast. What recorded calls never have (:mod:`.replay`) is left out, and so is what
    the plan, the group or the pairs already say."""
    key: list[Hashable] = [kernel.NAME, scoring.softmax_scale, scoring.softcap, *_where(given)]
    for t in given:
        if t is None:
            key.append(None)
        else:
            key += t.shape, t.stride(), t.dtype, t.data_ptr() % 16
    return [*key, *_shared_memory(given)]


def _shared_memory(given: Given) -> list[int]:
    """Where tensors lie that share memory: the first tensor in it, and the place there."""
    there = [t for t in given if t is not None]
    memories = [memory(t) for t in there]
    if len(set(memories)) == len(there):
        return []
    firsts = [memories.index(m) for m in memories]
    places = [int(t.storage_offset()) * t.itemsize for t in there]
    return [*firsts, *(at - places[n] for at, n in zip(places, firsts, strict=True))]


def _where(given: Given) -> list[Hashable]:
    """The tensors' device, its autocast dtype, its current stream, and the current device."""
    device = device_of(given)
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    if device.type != "cuda":
        return [device, autocast]
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    return [device, autocast, stream, torch._C._cuda_getDevice()]


def device_of(given: Given) -> torch.device:
    """The device of all of them."""
    return next(t.device for t in given if t is not None)
