"""flash-linear-attention's Triton kernels (Yang and Zhang, github.com/fla-org), on GPUs.

Its public chunk functions are called, by name; a backward runs the forward again below autograd.
They take packed sequences as a batch of 1, so where a rank has several segments the entries of a
batch are put one after the other.

    delta rule      a decay a head: chunk_gated_delta_rule     a channel: chunk_kda
    gates alone     a decay a head: chunk_simple_gla           a channel: chunk_gla
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from annotations.library.define import autograd_on

from ...ring_attention.core.arrays import Ints
from ...ring_attention.core.index_table import IndexTable
from ...ring_attention.core.kernels.window.signatures import lacking, required
from .protocol import Gradients, Operands

NAME = "fla"
WIDEST_KEYS = 256  # of the delta rule's state kernel
ARGUMENTS = ("q", "k", "v", "g", "scale", "initial_state", "output_final_state", "cu_seqlens")
# By whether it is the delta rule, and whether each channel has a decay: module and function.
FUNCTIONS = {
    (True, False): ("gated_delta_rule", "chunk_gated_delta_rule"),
    (True, True): ("kda", "chunk_kda"),
    (False, False): ("simple_gla", "chunk_simple_gla"),
    (False, True): ("gla", "chunk_gla"),
}
GROUPED = "chunk_gated_delta_rule"  # takes fewer heads of q and k than of v


@cache
def _function(delta: bool, channels: bool) -> Callable[..., Any]:
    module, name = FUNCTIONS[delta, channels]
    return getattr(importlib.import_module(f"fla.ops.{module}"), name)


@cache  # a broken install takes long to fail
def missing() -> str | None:
    """That it is not installed, or has other arguments than these."""
    try:
        for delta, channels in FUNCTIONS:
            wanted = (*ARGUMENTS, "beta") if delta else ARGUMENTS
            if lacks := lacking(_function(delta, channels), wanted):
                name = FUNCTIONS[delta, channels][1]
                return f"{name} of flash-linear-attention does not take {', '.join(lacks)}"
    except Exception as error:  # a broken install raises anything
        return f"flash-linear-attention cannot be imported: {error}"
    return None


def refuses(x: Operands) -> str | None:
    """Calls that are not in half precision on a GPU, or too wide."""
    if x.q.device.type != "cuda":
        return f"runs on cuda, not {x.q.device.type}"
    if x.q.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, not {str(x.q.dtype).removeprefix('torch.')}"
    if x.beta is not None and x.q.shape[-1] > WIDEST_KEYS:
        return f"takes dk of at most {WIDEST_KEYS}, not {x.q.shape[-1]}"
    return None


class Call(NamedTuple):
    """The library's arguments of a call."""

    tensors: dict[str, Tensor]
    initial: Tensor | None
    ends: Ints | None  # cumulative lengths; None where each entry of the batch is one segment


def forward(x: Operands, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """out and the final states."""
    if not x.v.shape[1]:
        return x.v.clone(), x.empty_states(0)
    out, final = _run(x, _call(x, initial))
    return out.reshape(x.v.shape), _states(final, x)


def final_states(x: Operands, initial: Tensor | None) -> Tensor:
    """The final states; the library computes out as well."""
    return forward(x, initial)[1]


def backward(x: Operands, initial: Tensor | None, dout: Tensor, dfinal: Tensor | None) -> Gradients:
    """By the library's autograd."""
    if not x.v.shape[1]:
        nothing: dict[str, Any] = {name: torch.zeros_like(t) for name, t in x.tensors.items()}
        return Gradients(**{"beta": None, **nothing}, initial=initial)
    call = _call(x, initial)
    named = call.tensors if call.initial is None else {**call.tensors, "initial": call.initial}
    leaves = {name: t.detach().requires_grad_() for name, t in named.items()}
    with autograd_on():
        tensors = {name: leaves[name] for name in call.tensors}
        out, final = _run(x, Call(tensors, leaves.get("initial"), call.ends))
        results, grads = [out], [dout.reshape(out.shape).contiguous()]
        if dfinal is not None:
            results, grads = [out, final], [*grads, _sequences(dfinal)]
        made = torch.autograd.grad(results, list(leaves.values()), grads)
    found = dict(zip(leaves, made, strict=True))
    of_initial = _states(found.pop("initial"), x) if initial is not None else None
    of_tokens: dict[str, Any] = {n: _for_groups(grad, x.tensors[n]) for n, grad in found.items()}
    return Gradients(**{"beta": None, **of_tokens}, initial=of_initial)


def initial_gradient(x: Operands, dout: Tensor, dfinal: Tensor | None) -> Tensor:
    """From a whole backward, which the library does not divide."""
    found = backward(x, x.empty_states(len(x.ends) - 1), dout, dfinal).initial
    assert found is not None
    return found


def _call(x: Operands, initial: Tensor | None) -> Call:
    delta, channels = x.beta is not None, x.g.ndim == 4
    tensors = x.tensors
    if FUNCTIONS[delta, channels][1] != GROUPED:
        each = x.v.shape[2] // x.q.shape[2]
        tensors |= {name: tensors[name].repeat_interleave(each, 2) for name in "qk"}
    ends = None
    if len(x.ends) > 2:
        b, t = x.v.shape[:2]
        starts = (x.ends[:-1] + t * np.arange(b)[:, None]).reshape(-1)
        ends = np.append(starts, b * t)
        tensors = {name: each.flatten(0, 1).unsqueeze(0) for name, each in tensors.items()}
    tensors = {name: each.contiguous() for name, each in tensors.items()}
    return Call(tensors, None if initial is None else _sequences(initial), ends)


def _run(x: Operands, call: Call) -> tuple[Tensor, Tensor]:
    function = _function(x.beta is not None, x.g.ndim == 4)
    given: dict[str, Any] = {
        **call.tensors,
        "scale": x.scale,
        "initial_state": call.initial,
        "output_final_state": True,
        "cu_seqlens": None if call.ends is None else IndexTable(call.ends).on(x.q.device),
    }
    if call.ends is not None and "cu_seqlens_cpu" in required(function):  # else it copies them back
        given["cu_seqlens_cpu"] = torch.from_numpy(call.ends)
    return function(**given)


def _sequences(states: Tensor) -> Tensor:
    """[m, b, hv, dk, dv] -> [b * m, hv, dk, dv], each entry's segments one after the other."""
    return states.transpose(0, 1).flatten(0, 1).contiguous()


def _states(sequences: Tensor, x: Operands) -> Tensor:
    """The inverse."""
    each = sequences.unflatten(0, (x.v.shape[0], len(x.ends) - 1))
    return each.transpose(0, 1).to(x.state_dtype)


def _for_groups(grad: Tensor, like: Tensor) -> Tensor:
    """Gradients of repeated heads, added up."""
    b, t, *heads = like.shape
    grad = grad.reshape(b, t, *grad.shape[2:])
    if grad.shape[2] == heads[0]:
        return grad
    return grad.unflatten(2, (heads[0], -1)).sum(3)
