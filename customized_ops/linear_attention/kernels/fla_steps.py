"""flash-linear-attention in steps, for a decay a head: chunks by themselves, states, out.

Names are the library's: of a chunk, w and u are what the delta rule's triangular system makes of k
and v (u minus w S is what is written), h is the state that enters it.

The library's functions work on logs to the base 2 of decays, summed up within a chunk.
"""

from __future__ import annotations

import importlib
import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...along_sequence.packed_sequences import CHUNK
from .fla_calls import flat, gradients_of, repeated, sequences, states_of
from .protocol import Gradients, Operands, nothing_kept, unit_states

OPS = "fla.ops"


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{OPS}.{module}"), name)


class Chunks:
    """What does not depend on states.

    Attributes:
        t: tensors of tokens, with g as the library has it.
        where: arguments of all functions: which tokens are whose.
        lengths: the one of these that functions of states take.
    """

    def __init__(self, x: Operands) -> None:
        self.x, call = x, flat(x.tensors, x)
        self.t = dict(call.tensors)
        self.where = {} if call.packed is None else call.packed.on(x.q.device)
        self.lengths = self.where.get("cu_seqlens")
        self.t["g"] = self.summed(self.t["g"], scale=math.log2(math.e))

    def summed(self, g: Tensor, **more: Any) -> Tensor:
        """Summed up within chunks."""
        return _function("utils", "chunk_local_cumsum")(g, chunk_size=CHUNK, **more, **self.where)

    def some(self, *names: str) -> dict[str, Tensor]:
        """Tensors by name."""
        return {name: self.t[name] for name in names}

    def each(self, name: str) -> Tensor:
        """q or k for each head of v."""
        heads = self.t["v"].shape[2] // self.t[name].shape[2]
        return repeated(self.t[name], heads)


class DeltaForward:
    """See :class:`.protocol.Forward`."""

    def __init__(self, x: Operands, kept: Tensor | None = None) -> None:
        self.x, self.chunks = x, Chunks(x)
        given = {**self.chunks.some("k", "v", "g", "beta"), **self.chunks.where}
        if kept is None:
            solved = _function("gated_delta_rule.chunk_fwd", "chunk_gated_delta_rule_fwd_intra")
            self.w, self.u, self.inverse = solved(**given, chunk_size=CHUNK)
        else:
            self.inverse = flat({"kept": kept}, x).tensors["kept"]
            made = _function("gated_delta_rule.wy_fast", "recompute_w_u_fwd")
            self.w, self.u = made(**given, A=self.inverse)
        self.h, self.written = self.u, self.u

    def states(self, initial: Tensor | None) -> Tensor:
        """Of each chunk, which out is made of, and the final ones."""
        initial = None if initial is None else sequences(initial)
        self.h, self.written, final = self._states(self.u, initial)
        return states_of(final, self.x)

    def _states(self, u: Tensor, initial: Tensor | None) -> Any:
        run = _function("common.chunk_delta_h", "chunk_gated_delta_rule_fwd_h")
        given = {**self.chunks.some("k", "g"), "w": self.w, "u": u, "initial_state": initial}
        return run(**given, output_final_state=True, chunk_size=CHUNK, **self.chunks.where)

    def matrices(self) -> Tensor:
        """From units."""
        zeros, units = unit_states(self.x)
        return states_of(self._states(torch.zeros_like(self.w), sequences(units))[2], zeros)

    def out(self) -> Tensor:
        """By the states."""
        out = _function("common.chunk_o", "chunk_fwd_o")(
            **self.chunks.some("q", "k", "g"),
            **{"v": self.written, "h": self.h, "scale": self.x.scale, "chunk_size": CHUNK},
            **self.chunks.where,
        )
        return out.reshape(self.x.v.shape)

    def kept(self) -> Tensor:
        """The inverses of the triangular systems, a row for each token."""
        return self.inverse.reshape(*self.x.v.shape[:3], CHUNK)


class DeltaBackward:
    """See :class:`.protocol.Backward`."""

    def __init__(self, x: Operands, initial: Tensor | None, kept: Tensor, dout: Tensor) -> None:
        self.x, self.of, self.forward = x, initial, DeltaForward(x, kept)
        self.chunks, self.known, self.dinitial = self.forward.chunks, False, initial
        self.do = flat({"dout": dout}, x).tensors["dout"]
        self.given = {"do": self.do, "scale": x.scale, "chunk_size": CHUNK, **self.chunks.where}
        inside = _function("common.chunk_o", "chunk_bwd_dv_local")
        self.inside = inside(**self.chunks.some("q", "k", "g"), **self.given)
        self.dh, self.dv = self.inside, self.inside

    def initial(self, dfinal: Tensor | None) -> Tensor | None:
        """Gradients of all chunks' states."""
        run = _function("common.chunk_delta_h", "chunk_gated_delta_rule_bwd_dhu")
        self.dh, dinitial, self.dv = run(
            **self.chunks.some("q", "k", "g"),
            **{"w": self.forward.w, "h0": None if self.of is None else sequences(self.of)},
            **{"dht": None if dfinal is None else sequences(dfinal), "dv": self.inside},
            **self.given,
        )
        self.dinitial = None if dinitial is None else states_of(dinitial, self.x)
        return self.dinitial

    def ahead(self) -> None:
        """The states."""
        if not self.known:
            self.forward.states(self.of)
            self.known = True

    def gradients(self) -> Gradients:
        """By states and their gradients."""
        self.ahead()
        forward, chunks = self.forward, self.chunks
        dq, dk, dw, dg = _function("common.chunk_o", "chunk_bwd_dqkwg")(
            **chunks.some("q", "k", "g"),
            **{"v": forward.written, "w": forward.w, "h": forward.h, "dv": self.dv, "dh": self.dh},
            **self.given,
        )
        more_k, dv, dbeta, more_g = _function("gated_delta_rule.wy_fast", "prepare_wy_repr_bwd")(
            **chunks.some("k", "v", "beta", "g"),
            **{"A": forward.inverse, "dw": dw, "du": self.dv},
            **chunks.where,
        )
        dg = chunks.summed(dg.add_(more_g), reverse=True)
        found = {"q": dq, "k": dk.add_(more_k), "v": dv, "g": dg, "beta": dbeta}
        return gradients_of(found, self.dinitial, self.x)


def _states_of_gates(
    chunks: Chunks, k: Tensor, initial: Tensor | None, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """States of each chunk, in fp32 if ``exact``, and the final ones; k for each head of v."""
    h, final = _function("common.chunk_h", "chunk_fwd_h")(
        **{"k": k, **chunks.some("v", "g"), "states_in_fp32": exact},
        h0=None if initial is None else sequences(initial),
        **{
            "output_final_state": True,
            "chunk_size": CHUNK,
            "cu_seqlens": chunks.where.get("cu_seqlens"),
        },
    )
    return h, states_of(final, chunks.x)


class GatesForward:
    """See :class:`.protocol.Forward`."""

    def __init__(self, x: Operands) -> None:
        self.x, self.chunks = x, Chunks(x)
        self.k = self.chunks.each("k")
        self.h = x.v

    def states(self, initial: Tensor | None) -> Tensor:
        """Of each chunk, which out is made of, and the final ones."""
        self.h, final = _states_of_gates(self.chunks, self.k, initial)
        return final

    def matrices(self) -> Tensor:
        """From units."""
        zeros, units = unit_states(self.x)
        return GatesForward(zeros).states(units)

    def out(self) -> Tensor:
        """By the states."""
        out = _function("common.chunk_o", "chunk_fwd_o")(
            **self.chunks.some("q", "k", "v", "g"),
            **{"h": self.h, "scale": self.x.scale, "chunk_size": CHUNK},
            **self.chunks.where,
        )
        return out.reshape(self.x.v.shape)

    def kept(self) -> Tensor:
        """Nothing."""
        return nothing_kept(self.x)


class GatesBackward:
    """See :class:`.protocol.Backward`."""

    def __init__(self, x: Operands, initial: Tensor | None, dout: Tensor) -> None:
        self.x, self.of, self.chunks, self.dinitial = x, initial, Chunks(x), initial
        self.do = flat({"dout": dout}, x).tensors["dout"]
        self.h: Tensor | None = None
        self.dh = self.do

    @cached_property
    def q(self) -> Tensor:
        """q for each head of v."""
        return self.chunks.each("q")

    def initial(self, dfinal: Tensor | None) -> Tensor | None:
        """Gradients of all chunks' states."""
        self.dh, dinitial = _function("common.chunk_h", "chunk_bwd_dh")(
            **{"q": self.q, "k": self.q},  # k is asked for its shape alone
            **self.chunks.some("v", "g"),
            **{"do": self.do, "h0": None if self.of is None else sequences(self.of)},
            **{"dht": None if dfinal is None else sequences(dfinal), "scale": self.x.scale},
            **{
                "states_in_fp32": True,
                "chunk_size": CHUNK,
                "cu_seqlens": self.chunks.where.get("cu_seqlens"),
            },
        )
        self.dinitial = None if dinitial is None else states_of(dinitial, self.x)
        return self.dinitial

    def ahead(self) -> None:
        """The states, and q as :meth:`initial` wants it."""
        if self.h is None:
            k = self.chunks.each("k")
            self.h = _states_of_gates(self.chunks, k, self.of, exact=True)[0]
            _ = self.q

    def gradients(self) -> Gradients:
        """By states and their gradients."""
        self.ahead()
        chunks = self.chunks
        given = {"do": self.do, "dh": self.dh, "scale": self.x.scale, "chunk_size": CHUNK}
        dq, dk, _, dg = _function("common.chunk_o", "chunk_bwd_dqkwg")(
            **chunks.some("q", "k", "v", "g"), h=self.h, **given, **chunks.where
        )
        made = _function("common.chunk_o", "chunk_bwd_dv")
        dv = made(**chunks.some("q", "k", "g"), **given, **chunks.where)
        found = {"q": dq, "k": dk, "v": dv, "g": chunks.summed(dg, reverse=True)}
        return gradients_of(found, self.dinitial, self.x)


def forward(x: Operands) -> DeltaForward | GatesForward:
    """Of the delta rule, or of gates alone."""
    return GatesForward(x) if x.beta is None else DeltaForward(x)


def backward(
    x: Operands, initial: Tensor | None, kept: Tensor, dout: Tensor
) -> DeltaBackward | GatesBackward:
    """The same."""
    if x.beta is None:
        return GatesBackward(x, initial, dout)
    return DeltaBackward(x, initial, kept, dout)
