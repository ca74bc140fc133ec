"""Whether a call can bypass torch's dispatcher, because only autograd and our kernel would run.

The dispatcher decides by the keys of the tensors and of the thread. A program has only a few sets
of keys, so the answer is cached for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_KEYS: Any = torch._C.DispatchKey
_BACKENDS = (_KEYS.CPU, _KEYS.CUDA)
_AUTOGRAD = (_KEYS.AutogradCPU, _KEYS.AutogradCUDA)
# Keys that do nothing for our ops: these are not autocast, take their device from their tensors,
# and make no views.
_IGNORED = [key for name, key in _KEYS.__members__.items() if name.startswith("Autocast")] + [
    _KEYS.BackendSelect,
    _KEYS.ADInplaceOrView,
]

_only_backend: dict[int, bool] = {}
_can_bypass: dict[tuple[int, ...], bool] = {}


def can_bypass_dispatcher(*tensors: Tensor) -> bool:
    """Whether the dispatcher would only run autograd and the kernel of an op of ours: all tensors
    have data, and there is no subclass, mode, transform, tracer or profiler.

    False for an argument that is not a tensor.
    """
    if torch._C._is_torch_function_mode_enabled() or torch.autograd._profiler_enabled():
        return False
    if torch._C._has_torch_function(tensors):
        return False
    keys_of = torch._C._dispatch_keys
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    try:
        sets = tuple([keys_of(t).raw_repr() for t in tensors])
    except TypeError:
        return False
    key = (included.raw_repr(), excluded.raw_repr(), *sets)
    found = _can_bypass.get(key)
    if found is None:
        keys = included
        for t in tensors:
            keys = keys | keys_of(t)
        keys = keys - excluded
        for ignored in _IGNORED:
            keys = keys.remove(ignored)
        autograd_first = keys.highestPriorityTypeId() in _AUTOGRAD
        found = _can_bypass[key] = autograd_first and only_backend(keys)
    return found


def only_backend(keys: Any) -> bool:
    """Whether only a backend's kernel is left to run after autograd."""
    key = keys.raw_repr()
    found = _only_backend.get(key)
    if found is None:
        left = (keys & torch._C._after_autograd_keyset).remove(_KEYS.ADInplaceOrView)
        found = _only_backend[key] = left.highestPriorityTypeId() in _BACKENDS
    return found


def gradients_can_bypass(grads: Iterable[Tensor | None]) -> bool:
    """Whether a backward can bypass the dispatcher: its gradients have data, no mode is on, and
    autograd does not record it."""
    if torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return False
    for grad in grads:
        if grad is not None and not only_backend(torch._C._dispatch_keys(grad)):
            return False
    return True
