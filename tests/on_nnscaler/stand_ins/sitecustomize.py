"""Runs as each process starts: nnscaler on CPUs, and its attention modules as delegating ones.

``nnscaler.customized_ops.ring_attention.ring_attn`` then has a function of each name that our
module ``ring_attn`` has, which calls ours and is declared to engines as ours is.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from nnscaler.graph.tracer.concrete_proxy import ConcreteProxy
from nnscaler.graph.tracer.trace_strategy import TRACE_STRATEGY

from annotations.codegen.public_call import declare_call, declared_calls, qualified
from on_nnscaler.support.cpu import on_cpu

THEIRS, OURS = "nnscaler.customized_ops.ring_attention", "customized_ops.ring_attention"
GPUS = 4
ALLGATHER = "zigzag_allgather_attn_varlen"
DELEGATING = {
    f"{THEIRS}.{name}": f"{OURS}.{name}"
    for name in (
        *("ring_attn", "ring_attn_varlen", "zigzag_attn", "sliding_window_attn", ALLGATHER),
        *("maybe_shuffle", "varlen_utils"),
    )
} | {f"{THEIRS}.core.{ALLGATHER}_implementation": f"{OURS}.{ALLGATHER}"}


def _delegating(function: Callable[..., Any], module: str) -> Callable[..., Any]:
    signature = inspect.signature(function)
    # In low precision others than this are noisy on CPUs, in one process as well.
    exact = {"kernel": "reference"} if "kernel" in signature.parameters else {}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, **exact})

    call.__module__ = module
    call.__signature__ = signature  # type: ignore[attr-defined]
    declared = declared_calls().get(qualified(function))
    if declared is not None:
        declare_call(replace(declared, function=call))
    return call


class _Delegating(Loader):
    def exec_module(self, module: ModuleType) -> None:
        ours = importlib.import_module(DELEGATING[module.__name__])
        importlib.import_module(OURS)  # declares them
        for name, value in vars(ours).items():
            if isinstance(value, FunctionType) and value.__module__ == ours.__name__:
                setattr(module, name, _delegating(value, module.__name__))
        module.flash_attention_anno = getattr(ours, "flash_attention_anno", None)  # type: ignore[attr-defined]
        if module.__name__.endswith("_implementation"):
            short = f"{ALLGATHER}_func"
            setattr(module, short, getattr(ours, f"wrap_{short}"))


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, _Delegating()) if name in DELEGATING else None


sys.meta_path.insert(0, _Finder)


def _init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    kwargs.pop("device_id", None)
    _init("gloo", *args, **kwargs)


_init = dist.init_process_group
dist.init_process_group = _init_process_group
_cpu = on_cpu(True)  # left when it is no longer referred to
_cpu.__enter__()
ConcreteProxy.jump_opcodes = (  # Python 3.11 has some that nnscaler does not know
    *ConcreteProxy.jump_opcodes,
    *(code for name, code in dis.opmap.items() if "JUMP" in name and "IF" in name),
)
TRACE_STRATEGY.update(dict.fromkeys(TRACE_STRATEGY, TRACE_STRATEGY["cpu"]))
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: GPUS
torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
