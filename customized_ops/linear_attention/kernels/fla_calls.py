"""flash-linear-attention by its public functions; a backward reruns the forward under autograd.

They take packed sequences as a batch of 1, so where a rank has several segments, the batch entries
are laid end to end.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from annotations.library.define import autograd_on

from ...along_sequence.packed_sequences import PackedSequences, packed_sequences
from ...ring_attention.core.kernels.window.signatures import required
from .at_once import BackwardAtOnce, ForwardAtOnce
from .protocol import Gradients, Operands

# Module and function, by whether it is the delta rule and whether each channel has a decay.
FUNCTIONS = {
    (True, False): ("gated_delta_rule", "chunk_gated_delta_rule"),
    (True, True): ("kda", "chunk_kda"),
    (False, False): ("simple_gla", "chunk_simple_gla"),
    (False, True): ("gla", "chunk_gla"),
}
GROUPED = "chunk_gated_delta_rule"  # takes fewer heads of q and k than of v


@cache
def function_of(delta: bool, channels: bool) -> Callable[..., Any]:
    """The library's function."""
    module, name = FUNCTIONS[delta, channels]
    return getattr(importlib.import_module(f"fla.ops.{module}"), name)


def forward(x: Operands) -> ForwardAtOnce:
    """A forward by one call of the library."""
    return ForwardAtOnce(_forward, x)


def backward(x: Operands, initial: Tensor | None, dout: Tensor) -> BackwardAtOnce:
    """A backward by one call of autograd."""
    return BackwardAtOnce(_backward, x, initial, dout)


class Call(NamedTuple):
    """The arguments for a call of the library.

    Attributes:
        packed: None where each entry of the batch is one segment.
    """

    tensors: dict[str, Tensor]
    packed: PackedSequences | None


def _forward(x: Operands, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    if not x.v.shape[1]:
        return x.v.clone(), x.empty_states(0)
    states = None if initial is None else sequences(initial)
    out, final = _run(x, call_of(x), states)
    return out.reshape(x.v.shape), states_of(final, x)


def _backward(
    x: Operands, initial: Tensor | None, dout: Tensor, dfinal: Tensor | None
) -> Gradients:
    if not x.v.shape[1]:
        nothing = {name: torch.zeros_like(t) for name, t in x.tensors.items()}
        return Gradients(**nothing, initial=initial)
    call = call_of(x)
    given = call.tensors if initial is None else {**call.tensors, "initial": sequences(initial)}
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    with autograd_on():
        tensors = {name: leaves[name] for name in call.tensors}
        out, final = _run(x, call._replace(tensors=tensors), leaves.get("initial"))
        results, grads = [out], [dout.reshape(out.shape).contiguous()]
        if dfinal is not None:
            results, grads = [out, final], [*grads, sequences(dfinal)]
        made = torch.autograd.grad(results, list(leaves.values()), grads)
    found = dict(zip(leaves, made, strict=True))
    of_initial = states_of(found.pop("initial"), x) if initial is not None else None
    return gradients_of(found, of_initial, x)


def call_of(x: Operands) -> Call:
    """The tensors in the form that the library takes."""
    tensors = x.tensors
    if FUNCTIONS[x.delta, x.channels][1] != GROUPED:
        each = x.v.shape[2] // x.q.shape[2]
        tensors |= {name: repeated(tensors[name], each) for name in "qk"}
    return flat(tensors, x)


def repeated(x: Tensor, each: int) -> Tensor:
    """Every head repeated ``each`` times, [b, t, h * each, d]; no gradient. Copies eight bytes at a
    time where a head allows: each repeated element takes as long, however small it is."""
    if each == 1:
        return x
    x = x.contiguous()
    if x.element_size() * x.shape[-1] % 8 or x.element_size() * x.storage_offset() % 8:
        return x.repeat_interleave(each, 2)
    return x.view(torch.int64).repeat_interleave(each, 2).view(x.dtype)


def flat(tensors: dict[str, Tensor], x: Operands) -> Call:
    """Tensors of tokens, made contiguous, and with several segments as a batch of 1."""
    packed = packed_sequences(x.ends, x.v.shape[0])
    if packed is not None:
        tensors = {name: each.flatten(0, 1).unsqueeze(0) for name, each in tensors.items()}
    return Call({name: each.contiguous() for name, each in tensors.items()}, packed)


def _run(x: Operands, call: Call, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    function = function_of(x.delta, x.channels)
    given: dict[str, Any] = {
        **call.tensors,
        "scale": x.scale,
        "initial_state": initial,
        "output_final_state": True,
    }
    if call.packed is not None:
        # The library caches what it computed from a tensor, on whichever stream: give it a new one.
        given["cu_seqlens"] = call.packed.on(x.q.device)["cu_seqlens"].clone()
        if "cu_seqlens_cpu" in required(function):  # otherwise it copies them to the host
            given["cu_seqlens_cpu"] = torch.from_numpy(call.packed.ends.values)
    return function(**given)


def sequences(states: Tensor) -> Tensor:
    """[m, b, hv, dk, dv] -> [b * m, hv, dk, dv], each entry's segments one after the other."""
    return states.transpose(0, 1).flatten(0, 1).contiguous()


def states_of(found: Tensor, x: Operands) -> Tensor:
    """The inverse of :func:`sequences`, in the dtype of states."""
    each = found.unflatten(0, (x.v.shape[0], len(x.ends) - 1))
    return each.transpose(0, 1).to(x.state_dtype)


def gradients_of(found: dict[str, Tensor], initial: Tensor | None, x: Operands) -> Gradients:
    """Gradients from those of the library, which have the shapes of its call."""
    of_tokens = {name: _for_groups(grad, x.tensors[name]) for name, grad in found.items()}
    return Gradients(**of_tokens, initial=initial)


def _for_groups(grad: Tensor, like: Tensor) -> Tensor:
    """Gradients of repeated heads, added up to those of the original heads."""
    b, t, *heads = like.shape
    grad = grad.reshape(b, t, *grad.shape[2:])
    if grad.shape[2] == heads[0]:
        return grad
    return grad.unflatten(2, (heads[0], -1)).sum(3)
