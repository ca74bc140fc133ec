"""The delta rule by flash-linear-attention's stages: triangular systems of chunks, states, out.

Names are the library's. In a chunk, w and u are what the triangular system makes of k and v (u
minus w S is what is written), and h is the state that enters it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...along_sequence.packed_sequences import CHUNK
from .fla_calls import flat, gradients_of, sequences, states_of
from .fla_steps import Chunks, place, shares_memory, stage, widest_block
from .protocol import Gradients, Operands, unit_states


class DeltaForward:
    """See :class:`.protocol.Forward`."""

    def __init__(self, x: Operands, kept: Tensor | None = None) -> None:
        self.x, self.chunks = x, Chunks(x)
        given = {**self.chunks.some("k", "v", "g", "beta"), **self.chunks.where}
        if kept is None:
            solved = stage("gated_delta_rule.chunk_fwd", "chunk_gated_delta_rule_fwd_intra")
            self.w, self.u, self.inverse = solved(**given, chunk_size=CHUNK)
        else:
            self.inverse = flat({"kept": kept}, x).tensors["kept"]
            made = stage("gated_delta_rule.wy_fast", "recompute_w_u_fwd")
            self.w, self.u = made(**given, A=self.inverse)
        self.h, self.written = self.u, self.u

    def states(self, initial: Tensor | None) -> Tensor:
        """Computes the states of all chunks, from which out is made; returns the final ones."""
        initial = None if initial is None else sequences(initial)
        self.h, self.written, final = self._states(self.u, initial)
        return states_of(final, self.x)

    def _states(self, u: Tensor, initial: Tensor | None) -> Any:
        run = stage("common.chunk_delta_h", "chunk_gated_delta_rule_fwd_h")
        given = {**self.chunks.some("k", "g"), "w": self.w, "u": u, "initial_state": initial}
        where = {**self.chunks.where, "chunk_offsets": self.chunks.offsets}
        return run(**given, output_final_state=True, chunk_size=CHUNK, **where)

    def matrices(self) -> Tensor:
        """Found as the final states of unit states."""
        zeros, units = unit_states(self.x)
        return states_of(self._states(torch.zeros_like(self.w), sequences(units))[2], zeros)

    def out(self, into: Tensor | None = None) -> Tensor:
        """Made from the states of chunks."""
        return self.chunks.out(self.written, self.h, into)

    def kept(self) -> Tensor:
        """The inverses of the triangular systems, one row per token."""
        return self.inverse.reshape(*self.x.v.shape[:3], CHUNK)


class DeltaBackward:
    """See :class:`.protocol.Backward`."""

    def __init__(self, x: Operands, initial: Tensor | None, kept: Tensor, dout: Tensor) -> None:
        self.x, self.of, self.forward = x, initial, DeltaForward(x, kept)
        self.chunks, self.known, self.dinitial = self.forward.chunks, False, initial
        self.do = flat({"dout": dout}, x).tensors["dout"]
        self.given = {"do": self.do, "scale": x.scale, "chunk_size": CHUNK, **self.chunks.where}
        inside = stage("common.chunk_o", "chunk_bwd_dv_local")
        self.inside = inside(**self.chunks.some("q", "k", "g"), **self.given)
        self.dh, self.dv = self.inside, self.inside

    def initial(self, dfinal: Tensor | None) -> Tensor | None:
        """Computes the gradients of all chunks' states; returns those of the initial ones."""
        run = stage("common.chunk_delta_h", "chunk_gated_delta_rule_bwd_dhu")
        self.dh, dinitial, self.dv = run(
            **self.chunks.some("q", "k", "g"),
            **{"w": self.forward.w, "h0": None if self.of is None else sequences(self.of)},
            **{"dht": None if dfinal is None else sequences(dfinal), "dv": self.inside},
            **self.given,
            chunk_offsets=self.chunks.offsets,
        )
        self.dinitial = None if dinitial is None else states_of(dinitial, self.x)
        return self.dinitial

    def ahead(self) -> None:
        """Computes the states again, once."""
        if not self.known:
            self.forward.states(self.of)
            self.known = True

    def gradients(self, into: Mapping[str, Tensor]) -> Gradients:
        """Made from the states and their gradients."""
        self.ahead()
        dq, dk, dw, dg = self._by_states(into)
        more_k, dv, dbeta, more_g = self._by_systems(dw, into)
        k = self.chunks.t["k"]
        dq, dk, more_k = (_of_groups(each, k.shape[2]) for each in (dq, dk, more_k))
        dk = torch.add(dk, more_k, out=place(into.get("k"), k))
        dg = self.chunks.summed(dg.add_(more_g), reverse=True)
        found = {"q": dq, "k": dk, "v": dv, "g": dg, "beta": dbeta}
        return gradients_of(found, self.dinitial, self.x)

    def _by_states(self, into: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of q and k for each head of v, of w, and of g, without the systems' share."""
        forward, chunks, g = self.forward, self.chunks, self.chunks.t["g"]
        read = {"v": forward.written, "h": forward.h, "do": self.do, "dh": self.dh, "dv": self.dv}
        narrow = all(each.element_size() == 2 for each in read.values())
        blocks = chunks.blocks(widest_block(g.device, narrow))
        parts = -(-chunks.t["q"].shape[-1] // blocks["BK"])
        dq, dk = place(into.get("q"), forward.w), torch.empty_like(forward.w)
        dw, dg = torch.empty_like(forward.w), g.new_empty(parts, *g.shape, dtype=torch.float32)
        made = {"dq": dq, "dk": dk, "dw": dw, "dg": dg}
        given = {**chunks.some("q", "k", "g"), **read, **made, **blocks, "g_gamma": None}
        given |= {"scale": self.x.scale, "B": g.shape[0], "STATE_V_FIRST": False}
        chunks.launch("common.chunk_o", "chunk_bwd_kernel_dqkwg", lambda _: parts, **given)
        return dq, dk, dw, dg.sum(0)

    def _by_systems(
        self, dw: Tensor, into: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The systems' share of the gradients of k and g, and the gradients of v and beta."""
        chunks, t = self.chunks, self.chunks.t
        blocks = chunks.blocks(64 if shares_memory(dw.device) else 32)
        made = {"dk": torch.empty_like(dw), "dv": place(into.get("v"), t["v"])}
        made |= {"db": torch.empty_like(t["beta"]), "dg": torch.empty_like(t["g"])}
        given = {"A": self.forward.inverse, "dw": dw, "du": self.dv}
        given |= {**chunks.some("k", "v", "beta", "g"), **made, **blocks}
        module = "gated_delta_rule.wy_fast"
        chunks.launch(module, "prepare_wy_repr_bwd_kernel", lambda _: 1, **given)
        return made["dk"], made["dv"], made["db"], made["dg"]


def _of_groups(grad: Tensor, heads: int) -> Tensor:
    """Gradients for each head of v, added up to those for each head of k."""
    return grad if grad.shape[2] == heads else grad.unflatten(2, (heads, -1)).sum(3)
