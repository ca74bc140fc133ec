"""The cut for recurrent layers that are recomputed in a backward.

Activation checkpointing runs layers again during the backward, possibly after the context of the
batch has ended, and on GPUs in an autograd thread that has no contexts. Attention receives its cut
with the mask. Functions of recurrent layers receive only tensors, so transformers' checkpointing is
made to carry the cut. With any other checkpointing the cut is unknown, which is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from ...op.arguments import ArgumentError
from .calling_modules import calling_modules
from .cut import Cut, running_cut, within
from .mask_function import TITLE

FUNCTION = "_gradient_checkpointing_func"  # layers' attribute, the function that checkpoints them

_carried: ContextVar[bool] = ContextVar("seqshard_carried", default=False)
_layers_that_were_cut: WeakSet[torch.nn.Module] = WeakSet()


class _Carrying:
    """Replaces the attribute: wraps a layer's own function so that a rerun has the same cut."""

    def __get__(self, layer: torch.nn.Module | None, owner: type) -> Any:
        if layer is None:
            return self
        if FUNCTION not in layer.__dict__:
            raise AttributeError(FUNCTION)
        return partial(_checkpointed, layer.__dict__[FUNCTION])

    def __set__(self, layer: torch.nn.Module, function: Any) -> None:
        layer.__dict__[FUNCTION] = function


def carry_cuts() -> None:
    """Make transformers' checkpointing carry the cut with which a layer runs."""
    if not isinstance(GradientCheckpointingLayer.__dict__.get(FUNCTION), _Carrying):
        setattr(GradientCheckpointingLayer, FUNCTION, _Carrying())


def _checkpointed(function: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(partial(_as_it_ran, running_cut(), run), *args, **kwargs)


def _as_it_ran(cut: Cut | None, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = _carried.set(True)
    try:
        with within(cut):
            return run(*args, **kwargs)
    finally:
        _carried.reset(token)


def cut_of_layer() -> Cut | None:
    """The cut with which the calling layer runs, or first ran; None for whole inputs.

    Raises:
        ArgumentError: the layer is being recomputed, and it is not known with which cut it ran.
    """
    cut, again = running_cut(), torch._C._current_graph_task_id() != -1
    if cut is None and (_carried.get() or not again):
        return None
    layer, _ = next(calling_modules(), (None, None))
    if cut is not None and layer is not None:
        _layers_that_were_cut.add(layer)
    elif layer in _layers_that_were_cut:
        raise ArgumentError(
            f"{TITLE}: a recurrent layer is computed again for a backward by activation "
            "checkpointing that is not transformers' own, so it is not known how its tokens were "
            "cut; call gradient_checkpointing_enable() of the model instead"
        )
    return cut
