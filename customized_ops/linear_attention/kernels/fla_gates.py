"""Gates alone by flash-linear-attention's stages: states of chunks, then out.

The library's kernels for states are launched here, not by its functions: these ask the GPU how many
chunks packed sequences have, and the host waits.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...along_sequence.packed_sequences import CHUNK, PackedSequences
from .fla_calls import flat, gradients_of, sequences, states_of
from .fla_steps import Chunks, place, stage, widest_block
from .protocol import Gradients, Operands, nothing_kept, unit_states

Packed = PackedSequences | None


class GatesForward:
    """See :class:`.protocol.Forward`."""

    def __init__(self, x: Operands) -> None:
        self.x, self.chunks = x, Chunks(x)
        self.k: Tensor | None = self.chunks.each("k")
        self.h = x.v

    def states(self, initial: Tensor | None) -> Tensor:
        """Computes the states of all chunks, from which out is made; returns the final ones."""
        t, initial = self.chunks.t, None if initial is None else sequences(initial)
        k = self.chunks.each("k") if self.k is None else self.k
        self.h, final = _states(k, t["v"], t["g"], initial, self.chunks.packed, exact=False)
        return states_of(final, self.x)

    def matrices(self) -> Tensor:
        """Found as the final states of unit states."""
        zeros, units = unit_states(self.x)
        return GatesForward(zeros).states(units)

    def out(self, into: Tensor | None = None) -> Tensor:
        """Made from the states of chunks."""
        self.k = None  # frees memory
        return self.chunks.out(self.chunks.t["v"], self.h, into)

    def kept(self) -> Tensor:
        """Nothing is kept."""
        return nothing_kept(self.x)


class GatesBackward:
    """See :class:`.protocol.Backward`."""

    def __init__(self, x: Operands, initial: Tensor | None, dout: Tensor) -> None:
        self.x, self.of, self.chunks, self.dinitial = x, initial, Chunks(x), initial
        self.do = flat({"dout": dout}, x).tensors["dout"]
        self.h: Tensor | None = None
        self.dh = self.do
        self.q: Tensor | None = None

    def _q_of_each(self) -> Tensor:
        """q for each head of v, held until :meth:`gradients`."""
        if self.q is None:
            self.q = self.chunks.each("q")
        return self.q

    def initial(self, dfinal: Tensor | None) -> Tensor | None:
        """Computes the gradients of all chunks' states; returns those of the initial ones."""
        t, packed = self.chunks.t, self.chunks.packed
        of, dfinal = (None if s is None else sequences(s) for s in (self.of, dfinal))
        given = self._q_of_each(), t["v"], t["g"], self.do, of, dfinal, self.x.scale, packed
        self.dh, dinitial = _gradients_of_states(*given)
        self.dinitial = None if dinitial is None else states_of(dinitial, self.x)
        return self.dinitial

    def ahead(self) -> None:
        """Computes the states, and q in the form that :meth:`initial` needs."""
        if self.h is None:
            t, of = self.chunks.t, None if self.of is None else sequences(self.of)
            k = self.chunks.each("k")
            self.h, _ = _states(k, t["v"], t["g"], of, self.chunks.packed, exact=True)
            self._q_of_each()

    def gradients(self, into: Mapping[str, Tensor]) -> Gradients:
        """Made from the states and their gradients."""
        self.ahead()
        self.q, chunks = None, self.chunks  # frees memory
        given = {"do": self.do, "dh": self.dh, "scale": self.x.scale, "chunk_size": CHUNK}
        dq, dk, _, dg = stage("common.chunk_o", "chunk_bwd_dqkwg")(
            **chunks.some("q", "k", "v", "g"), h=self.h, **given, **chunks.where
        )
        dv = self._of_values(into)
        found = {"q": dq, "k": dk, "v": dv, "g": chunks.summed(dg, reverse=True)}
        return gradients_of(found, self.dinitial, self.x)

    def _of_values(self, into: Mapping[str, Tensor]) -> Tensor:
        chunks, v = self.chunks, self.chunks.t["v"]
        blocks, dv = chunks.blocks(widest_block(v.device, False)), place(into.get("v"), v)
        given = {**chunks.some("q", "k", "g"), "do": self.do, "dh": self.dh, "dv": dv, **blocks}
        given |= {"g_gamma": None, "scale": self.x.scale, "STATE_V_FIRST": False}
        parts = -(-v.shape[-1] // blocks["BV"])
        chunks.launch("common.chunk_o", "chunk_bwd_kernel_dv", lambda _: parts, **given)
        return dv


def _states(
    k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, packed: Packed, exact: bool
) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk, and the state that leaves each sequence.

    Args:
        k, v, g: [b, t, hv, dk], [b, t, hv, dv], [b, t, hv]; g holds the base-2 logs of decays,
            summed up within chunks.
        initial: [n, hv, dk, dv] in fp32, for each sequence, or None.
        exact: whether the first result is in fp32; otherwise it is in k's dtype.
    Returns:
        [b, chunks, hv, dk, dv] and [n, hv, dk, dv], the latter in fp32.
    """
    h = _of_chunks(k, v, packed, torch.float32 if exact else k.dtype)
    final = k.new_empty(_sequences(k, packed), *h.shape[2:], dtype=torch.float32)
    given = {"k": k, "v": v, "g": g, "h": h, "h0": initial, "ht": final}
    _launch("chunk_fwd_kernel_h", k, h, packed, **given)
    return h, final


def _gradients_of_states(
    q: Tensor,
    v: Tensor,
    g: Tensor,
    dout: Tensor,
    initial: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    packed: Packed,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the state that leaves each chunk, and of the initial states (None where there
    are none); in fp32. See :func:`_states`; q is scaled."""
    dh = _of_chunks(q, v, packed, torch.float32)
    dinitial = None if initial is None else torch.empty_like(initial, dtype=torch.float32)
    given = {"q": q, "g": g, "do": dout, "dh": dh, "dht": dfinal, "dh0": dinitial, "scale": scale}
    _launch("chunk_bwd_kernel_dh", q, dh, packed, **given, HQ=q.shape[2], NG=1)
    return dh, dinitial


def _sequences(k: Tensor, packed: Packed) -> int:
    return k.shape[0] if packed is None else len(packed.ends.values) - 1


def _of_chunks(k: Tensor, v: Tensor, packed: Packed, dtype: torch.dtype) -> Tensor:
    b, t, heads, dk = k.shape
    chunks = -(-t // CHUNK) if packed is None else len(packed.chunks.values)
    return k.new_empty(b, chunks, heads, dk, v.shape[-1], dtype=dtype)


def _launch(name: str, x: Tensor, of_chunks: Tensor, packed: Packed, **given: Any) -> None:
    """Launch a block for each sequence, head and part of its state; x: [b, t, hv, dk]."""
    kernel = getattr(importlib.import_module("fla.ops.common.chunk_h"), name)
    (_, t, heads, dk), dv = x.shape, of_chunks.shape[-1]
    blocks = heads * _sequences(x, packed)

    def grid(tuned: dict[str, int]) -> tuple[int]:
        return (-(-dk // tuned["BK"]) * -(-dv // tuned["BV"]) * blocks,)

    lengths = None if packed is None else packed.on(x.device)["cu_seqlens"]
    kernel[grid](
        **{**given, "g_gamma": None, "gk": None, "gv": None},
        cu_seqlens=lengths,
        split_offsets=None if packed is None else packed.chunk_ends.on(x.device),
        **{"T": t, "H": heads, "K": dk, "V": dv, "BT": CHUNK, "BS": CHUNK, "USE_G": True},
        **{"USE_G_GAMMA": False, "USE_GK": False, "USE_GV": False, "STATE_V_FIRST": False},
    )
