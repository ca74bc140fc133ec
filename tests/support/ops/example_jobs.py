"""The examples on the ranks of a pool, which are started already; see ``ranks.Pool``."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Sequence
from unittest import mock

import torch
from rank_groups import device
from torch import Tensor

from customized_ops.ring_attention import wrap_ring_attn_func


def no_peers(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """Attention over a rank's own tokens alone: what an example should notice."""
    return wrap_ring_attn_func(q, k, v)


def no_merge(*_: object) -> None:
    """Leaves a rank's result as it is, whatever its peers found."""


def run(name: str, arguments: Sequence[str], change: tuple[str, object] | None = None) -> tuple:
    """What an example's ``main`` returns and prints here, with something, named from its module or
    another, changed."""
    module, said = importlib.import_module(name), io.StringIO()
    with contextlib.ExitStack() as stack:
        if change is not None:
            what, value = change
            stack.enter_context(mock.patch(what if "." in what else f"{name}.{what}", value))
        stack.enter_context(contextlib.redirect_stdout(said))
        failed = module.main(module.parse(arguments), torch.device(device()))
    return failed, said.getvalue()
