"""The examples on the ranks of a pool, which are started already; see ``ranks.Pool``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
import torch.distributed as dist
import train_llama
from rank_groups import device
from torch import Tensor

from customized_ops.ring_attention import wrap_ring_attn_func


def no_peers(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
    """Attention over a rank's own tokens alone: what an example should notice."""
    return wrap_ring_attn_func(q, k, v)


def no_peers_varlen(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
    """The same, of one document."""
    return wrap_ring_attn_func(q[None], k[None], v[None])[0]


def no_merge(*_: object) -> None:
    """Leaves a rank's result as it is, whatever its peers found."""


@contextlib.contextmanager
def said_here() -> Iterator[io.StringIO]:
    """What an example prints; the threads that it takes for itself are given back."""
    threads, said = torch.get_num_threads(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield said
    finally:
        torch.set_num_threads(threads)


def demo(arguments: Sequence[str]) -> tuple[int, str]:
    """What the demo's ``main`` returns and prints here for a command's arguments. Its module is not
    lowered: tracing takes longer than all else."""
    on_dtensors = functools.partial(train_llama.parallelize, lowered=False)
    with (
        said_here() as said,
        mock.patch.object(sys, "argv", ["train_llama.py", *arguments]),
        mock.patch.object(train_llama, "parallelize", on_dtensors),
    ):
        failed = train_llama.main(train_llama.parse())
    return failed, said.getvalue()


def run(name: str, arguments: Sequence[str], change: tuple[str, object] | None = None) -> tuple:
    """What an example's ``main`` returns and prints here, with something, named from its module or
    another, changed."""
    module = importlib.import_module(name)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with said_here() as said, contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, torchrun))  # as examples find it
        if change is not None:
            what, value = change
            stack.enter_context(mock.patch(what if "." in what else f"{name}.{what}", value))
        failed = module.main(module.parse(arguments), torch.device(device()))
    return failed, said.getvalue()
