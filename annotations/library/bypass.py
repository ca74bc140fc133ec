"""Whether a call is a plain one: tensors with data, and nobody who wants to see or change it.

What decides where torch's dispatcher takes a call are the keys of its tensors and of the thread.
Of the few sets of keys that there are in a program, what they mean is found out once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_KEYS: Any = torch._C.DispatchKey
_BACKENDS = (_KEYS.CPU, _KEYS.CUDA)
_AUTOGRAD = (_KEYS.AutogradCPU, _KEYS.AutogradCUDA)
# Ours are no ops to be autocast, have their tensors to be told the device by, and make no views.
_WITHOUT_US = [key for name, key in _KEYS.__members__.items() if name.startswith("Autocast")] + [
    _KEYS.BackendSelect,
    _KEYS.ADInplaceOrView,
]

_backends: dict[int, bool] = {}
_straight: dict[tuple[int, ...], bool] = {}


def goes_straight(*tensors: Tensor) -> bool:
    """Whether the dispatcher would take an op of ours through autograd to the function for tensors
    with data, with nobody looking on: no subclass, mode, transform, tracer or profiler.

    What is no tensor does not.
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
    found = _straight.get(key)
    if found is None:
        keys = included
        for t in tensors:
            keys = keys | keys_of(t)
        found = _straight[key] = _is_straight(keys - excluded)
    return found


def _is_straight(keys: Any) -> bool:
    for key in _WITHOUT_US:
        keys = keys.remove(key)
    return keys.highestPriorityTypeId() in _AUTOGRAD and only_backend(keys)


def only_backend(keys: Any) -> bool:
    """Whether nothing but a backend's kernel is left of a call, once autograd is done."""
    key = keys.raw_repr()
    found = _backends.get(key)
    if found is None:
        left = (keys & torch._C._after_autograd_keyset).remove(_KEYS.ADInplaceOrView)
        found = _backends[key] = left.highestPriorityTypeId() in _BACKENDS
    return found


def plain_gradients(grads: tuple[Tensor | None, ...]) -> bool:
    """Whether these are tensors with data, with no mode looking on, and not to be differentiated
    again."""
    if torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return False
    for grad in grads:
        if grad is not None and not only_backend(torch._C._dispatch_keys(grad)):
            return False
    return True
