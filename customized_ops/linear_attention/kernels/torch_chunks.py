"""Linear attention in plain torch, a chunk of every segment at a time; in fp64 it matches the
specification.

With S_0 the state before a chunk, G_i the sum of its log decays up to token i, and all products by
decays elementwise over dk (one decay a head is the same for all of dk):

    u_i + Σ_{j<i} A_ij u_j = β_i (v_i - S_0ᵀ (e^{G_i} k_i))     A_ij = β_i k_iᵀ (e^{G_i - G_j} k_j)
    o_i = scale (q_iᵀ (e^{G_i} S_0) + Σ_{j≤i} q_iᵀ (e^{G_i - G_j} k_j) u_jᵀ)
    S_n = e^{G_n} S_0 + Σ_j (e^{G_n - G_j} k_j) u_jᵀ

The first line is the delta rule in its WY form, a triangular system; with gates alone u_i = v_i.
Decays are differences of cumulative sums with i ≥ j, so for log decays of at most 0 no exponential
is above 1. All is in fp32 (fp64 for fp64), except for sums of log decays, which are in fp64.

The backward runs forward through the states, keeps those between chunks, and differentiates chunk
by chunk from the last. It needs memory for one chunk of each segment, and a state for each chunk.

Yang, Kautz, Hatamizadeh: Gated Delta Networks, arXiv:2412.06464 (2024); per-channel decays: Kimi
Linear, arXiv:2510.26692 (2025); gates alone: Dao and Gu: Transformers are SSMs, arXiv:2405.21060
(2024); the WY form: Bischof and Van Loan, SIAM J. Sci. Stat. Comput. 8 (1987).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from annotations.library.define import autograd_on

from ...ring_attention.core.index_table import IndexTable
from .at_once import BackwardAtOnce, ForwardAtOnce
from .protocol import Gradients, Operands

NAME = "torch"
# Tokens in a chunk. With a decay per channel, a chunk makes [chunk, chunk, dk] numbers per head.
CHUNK, CHUNK_OF_CHANNELS = 64, 16


def missing() -> str | None:
    return None


def refuses(x: Operands) -> str | None:
    return None


def unproven(x: Operands) -> str | None:
    return None


@dataclass(frozen=True)
class Steps:
    """The chunks of all segments: step n runs the n-th chunk of each segment that has one.

    Attributes:
        order, back: the segments, those with the most chunks first; and the inverse.
        rows: for each step int64[active, chunk]: indices of tokens, and the number ``tokens`` where
            a chunk is shorter.
        tokens: number of tokens.
    """

    order: IndexTable
    back: IndexTable
    rows: Sequence[Tensor]
    tokens: int

    @classmethod
    def of(cls, x: Operands) -> Steps:
        length, tokens = np.diff(x.ends), int(x.ends[-1])
        chunk = min(CHUNK_OF_CHANNELS if x.channels else CHUNK, int(length.max(initial=1)))
        chunks = -(-length // chunk)
        order = np.argsort(-chunks, kind="stable")
        start, stop = x.ends[order], x.ends[order + 1]
        at = start[:, None] + np.arange(int(chunks.max(initial=0)) * chunk)
        table = IndexTable(np.where(at < stop[:, None], at, tokens)).on(x.q.device)
        active = [int((chunks > n).sum()) for n in range(int(chunks.max(initial=0)))]
        rows = [table[:m, n * chunk : (n + 1) * chunk] for n, m in enumerate(active)]
        return cls(IndexTable(order), IndexTable(np.argsort(order)), rows, tokens)

    def sorted(self, states: Tensor | None, x: Operands) -> Tensor:
        """A copy of the segments' states in :attr:`order`."""
        if states is None:
            return x.empty_states(len(self.order.values))
        return states.index_select(0, self.order.on(states.device))

    def unsorted(self, states: Tensor) -> Tensor:
        """The inverse of :meth:`sorted`."""
        return states.index_select(0, self.back.on(states.device))


def kept_width(x: Operands) -> int:
    return 0


def forward(x: Operands) -> ForwardAtOnce:
    return ForwardAtOnce(_forward, x)


def backward(x: Operands, initial: Tensor | None, kept: Tensor, dout: Tensor) -> BackwardAtOnce:
    return BackwardAtOnce(_backward, x, initial, dout)


def _forward(x: Operands, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """out in the dtype of v, and the final states."""
    steps, tokens = Steps.of(x), _with_a_row_of_zeros(x)
    out = _rows_for(x.v, steps, x.v.dtype)
    states = steps.sorted(initial, x)
    for rows in steps.rows:
        n = len(rows)
        chunk_out, states[:n] = _chunk(_taken(tokens, rows, x.state_dtype), states[:n], x.scale)
        _put(out, rows, chunk_out)
    return out[:, : steps.tokens], steps.unsorted(states)


def _backward(
    x: Operands, initial: Tensor | None, dout: Tensor, dfinal: Tensor | None
) -> Gradients:
    """Gradients in the dtype of states."""
    steps, tokens = Steps.of(x), _with_a_row_of_zeros(x)
    wide = torch.cat([dout, dout.new_zeros(dout[:, :1].shape)], 1)
    grads = {name: _rows_for(t, steps, x.state_dtype) for name, t in x.tensors.items()}
    before, states = [], steps.sorted(initial, x)
    for rows in steps.rows:
        n = len(rows)
        before.append(states[:n].clone())
        states[:n] = _update(_taken(tokens, rows, x.state_dtype), before[-1])[-1]
    dstates = steps.sorted(dfinal, x)
    for rows, state in zip(reversed(steps.rows), reversed(before), strict=True):
        n = len(rows)
        leaves = {
            name: t.requires_grad_() for name, t in _taken(tokens, rows, x.state_dtype).items()
        }
        with autograd_on():
            results = _chunk(leaves, state.requires_grad_(), x.scale)
            found = torch.autograd.grad(
                results,
                [*leaves.values(), state],
                [_chunk_of(wide, rows, x.state_dtype), dstates[:n]],
            )
        for name, grad in zip(leaves, found, strict=False):
            _put(grads[name], rows, grad)
        dstates[:n] = found[-1]
    of_tokens = {name: grad[:, : steps.tokens] for name, grad in grads.items()}
    return Gradients(**of_tokens, initial=None if initial is None else steps.unsorted(dstates))


Chunk = dict[str, Tensor]  # [m, b, heads, chunk, ...] of each tensor, in the dtype of states


def _chunk(x: Chunk, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out [m, b, hv, chunk, dv] of a chunk, and the states after it."""
    q = _for_heads(x["q"], state) * scale
    k, decay, u, after = _update(x, state)
    inside = _products(q, k, decay).tril()
    return (q * _exp(decay, q)) @ state + inside @ u, after


def _update(x: Chunk, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k for each head, sums of log decays [m, b, hv, chunk, dk or 1] in fp64, u, and the states
    after. Sums grow along a chunk, but only their differences matter: in fp32 these would lose more
    digits the larger the sums are."""
    k, u = _for_heads(x["k"], state), x["v"]
    g = x["g"] if x["g"].ndim == 5 else x["g"].unsqueeze(-1)
    decay = g.double().cumsum(-2)
    if "beta" in x:
        beta = x["beta"].unsqueeze(-1)
        lower = (beta * _products(k, k, decay)).tril(-1)
        right = beta * (u - (k * _exp(decay, k)) @ state)
        u = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    end = decay[..., -1:, :]
    after = _exp(end.mT, k) * state + (k * _exp(end - decay, k)).mT @ u
    return k, decay, u, after


def _products(x: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """x_iᵀ (e^{G_i - G_j} k_j) for i ≥ j, [..., chunk, chunk]; above the diagonal, any finite
    number."""
    chunk = decay.shape[-2]
    above = torch.ones(chunk, chunk, dtype=torch.bool, device=k.device).triu(1).unsqueeze(-1)
    between = _exp((decay.unsqueeze(-2) - decay.unsqueeze(-3)).masked_fill(above, 0), k)
    if decay.shape[-1] == 1:
        return (x @ k.mT) * between.squeeze(-1)
    return torch.einsum("...id,...jd,...ijd->...ij", x, k, between)


def _exp(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype).exp()


def _for_heads(x: Tensor, state: Tensor) -> Tensor:
    """q or k for each head of v."""
    return x.repeat_interleave(state.shape[2] // x.shape[2], 2)


def _with_a_row_of_zeros(x: Operands) -> dict[str, Tensor]:
    """The tokens and a row of zeros, which pads short chunks: it leaves a state unchanged."""
    return {name: torch.cat([t, t.new_zeros(t[:, :1].shape)], 1) for name, t in x.tensors.items()}


def _taken(tokens: dict[str, Tensor], rows: Tensor, dtype: torch.dtype) -> Chunk:
    """The tokens in ``rows``, [m, chunk], of each tensor."""
    return {name: _chunk_of(t, rows, dtype) for name, t in tokens.items()}


def _chunk_of(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, t, heads, ...] -> [m, b, heads, chunk, ...]."""
    taken = x.index_select(1, rows.reshape(-1)).unflatten(1, rows.shape)
    return taken.movedim(0, 1).movedim(2, 3).to(dtype)


def _put(into: Tensor, rows: Tensor, chunk: Tensor) -> None:
    """The inverse of :func:`_chunk_of`, written into ``into``; padding goes to the last row."""
    values = chunk.movedim(3, 2).movedim(1, 0).flatten(1, 2).to(into.dtype)
    into.index_copy_(1, rows.reshape(-1), values)


def _rows_for(like: Tensor, steps: Steps, dtype: torch.dtype) -> Tensor:
    shape = list(like.shape)
    shape[1] = steps.tokens + 1
    return like.new_zeros(shape, dtype=dtype)
