"""By which cut a recurrent layer ran that is computed again for a backward.

Activation checkpointing runs layers again while the backward goes on, maybe when the context of the
batch is over, and on GPUs in a thread of autograd's that has no contexts. Attention is given its
cut with the mask. Functions of recurrent layers get tensors alone, so the cuts by which they ran
are noted by the layer that called them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch

from ...op.arguments import ArgumentError
from .cut import Cut, running_cut
from .mask_function import TITLE


@dataclass(eq=False)
class Noted:
    """Of one function of a layer.

    Attributes:
        last: the cut of its last forward; None where it was not cut.
        waiting: cuts of forwards that may be computed again, and were not; those that nothing else
            knows any more leave.
        recomputed: the cut that was taken last for a layer that is computed again.
    """

    last: Cut | None = None
    waiting: WeakSet[Cut] = field(default_factory=WeakSet)
    recomputed: Cut | None = None


_of_layers: WeakKeyDictionary[torch.nn.Module, dict[str, Noted]] = WeakKeyDictionary()


def cut_of_layer(function: str) -> Cut | None:
    """The cut by which the layer that calls ``function`` runs, or ran first; None for whole inputs.

    Raises:
        ArgumentError: batches that were cut in different ways wait for their backward.
    """
    layer = _calling_module()
    if layer is None:
        return running_cut()
    noted = _of_layers.setdefault(layer, {}).setdefault(function, Noted())
    if torch._C._current_graph_task_id() != -1:
        return _again(noted)
    cut = running_cut()
    noted.last, noted.recomputed = cut, None
    if cut is not None and (layer.training or torch.is_grad_enabled()):
        noted.waiting.add(cut)
    return cut


def _again(noted: Noted) -> Cut | None:
    waiting = list(noted.waiting)
    if any(not _alike(cut, noted.last) for cut in waiting):
        raise ArgumentError(
            f"{TITLE}: a recurrent layer is computed again for a backward, but batches that were "
            "cut in different ways wait for theirs; run each batch's backward before the next "
            "forward in training, or do without activation checkpointing"
        )
    if waiting:
        noted.recomputed = waiting[0]
        noted.waiting.discard(waiting[0])
    return noted.recomputed or noted.last


def _alike(one: Cut, other: Cut | None) -> bool:
    if other is None or one is other:
        return one is other
    same = one.group == other.group and one.layout == other.layout
    return (
        same
        and _equal(one.position_ids, other.position_ids)
        and _equal(one.attended, other.attended)
    )


def _equal(one: np.ndarray[Any, Any] | None, other: np.ndarray[Any, Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def _calling_module() -> torch.nn.Module | None:
    frame = inspect.currentframe()
    while frame is not None:
        # Locals that are looked at are kept by the frame, tensors among them.
        found = frame.f_locals["self"] if "self" in frame.f_code.co_varnames[:1] else None
        if isinstance(found, torch.nn.Module):
            return found
        frame = frame.f_back
    return None
