"""Marks the nodes of a graph that a model ran under ``torch.utils.checkpoint``.

torch.export records what a checkpointed call does, but not that it was checkpointed. So nodes are
marked while they are traced; :mod:`.recompute` then runs them as checkpointed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch.fx.traceback
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node
from torch.utils.checkpoint import noop_context_fn

from .call_inputs import CaptureError

KEY = "seqshard_region"


@contextmanager
def marked() -> Iterator[None]:
    """Nodes traced within are marked with the checkpointed call that they are part of.

    Raises:
        CaptureError: within, if the module has other hooks for saved tensors, which a graph does
            not keep, or chooses itself what a checkpointed call keeps.
    """
    enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__
    numbers = itertools.count()
    open_: list[AbstractContextManager[Any]] = []

    def entered(hooks: saved_tensors_hooks) -> Any:
        if type(hooks).__module__ != "torch.utils.checkpoint":
            raise CaptureError(
                f"{type(hooks).__name__} in the forward: hooks for saved tensors are not supported "
                "under parallelize, but for torch.utils.checkpoint's"
            )
        # The hooks do not know their context_fn; only the call that enters them does.
        chosen = sys._getframe(1).f_locals.get("context_fn", noop_context_fn)
        if chosen is not noop_context_fn:
            raise CaptureError(
                "checkpoint(context_fn=...) in the forward is not supported under parallelize, "
                "which chooses itself what is kept: the results of ops that communicate"
            )
        if open_:
            raise CaptureError(
                "checkpoint within a checkpointed call is not supported under parallelize; keep "
                "the outer one, which runs the inner's ops again as well"
            )
        open_.append(region(next(numbers)))
        open_[-1].__enter__()
        return enter(hooks)

    def left(hooks: saved_tensors_hooks, *error: Any) -> None:
        leave(hooks, *error)
        open_.pop().__exit__(None, None, None)

    with (
        mock.patch.object(saved_tensors_hooks, "__enter__", entered),
        mock.patch.object(saved_tensors_hooks, "__exit__", left),
        torch.fx.traceback.preserve_node_meta(),
    ):
        yield


def region(number: int) -> AbstractContextManager[Any]:
    """While inside, what is traced is marked as part of the checkpointed call of this number."""
    return torch.fx.traceback.annotate({KEY: number})


def region_of(node: Node) -> int | None:
    """The number of the checkpointed call that ``node`` is part of."""
    return node.meta.get("custom", {}).get(KEY)
