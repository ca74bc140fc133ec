"""The examples on the ranks of a pool, which are started already; see ``ranks.Pool``."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Sequence

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
    """What an example's ``main`` returns and prints here, with something of its module changed."""
    module, said = importlib.import_module(name), io.StringIO()
    before = {} if change is None else {change[0]: getattr(module, change[0])}
    try:
        if change is not None:
            setattr(module, *change)
        with contextlib.redirect_stdout(said):
            failed = module.main(module.parse(arguments), torch.device(device()))
    finally:
        for attribute, value in before.items():
            setattr(module, attribute, value)
    return failed, said.getvalue()
