"""What flash-linear-attention's stages share, with a decay per head: the work inside chunks.

The library works on base-2 logs of decays, summed up within a chunk. Kernels whose results are
tokens are launched here: the library's functions would allocate new tensors, but a rank's parts
belong in one.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...along_sequence.packed_sequences import CHUNK
from .fla_calls import flat, repeated
from .protocol import Operands

OPS = "fla.ops"


def stage(module: str, name: str) -> Any:
    """The library's function."""
    return getattr(importlib.import_module(f"{OPS}.{module}"), name)


class Chunks:
    """The chunks of a call: what does not depend on states.

    Attributes:
        t: tensors of tokens, with g as the library takes it.
        packed: None where each entry of the batch is one segment.
        where: arguments of all functions: which tokens belong to which sequence.
        offsets: for functions of states, the first chunk of each packed sequence; otherwise the
            library would cache its own table, on whichever stream it was made.
    """

    def __init__(self, x: Operands) -> None:
        self.x, call = x, flat(x.tensors, x)
        self.t, self.packed = dict(call.tensors), call.packed
        self.where: dict[str, Tensor] = {}
        self.offsets: Tensor | None = None
        if call.packed is not None:
            self.where = call.packed.on(x.q.device)
            self.offsets = call.packed.chunk_ends.on(x.q.device)
        self.t["g"] = self.summed(self.t["g"], scale=math.log2(math.e))

    def summed(self, g: Tensor, **more: Any) -> Tensor:
        """``g``, summed up within chunks."""
        return stage("utils", "chunk_local_cumsum")(g, chunk_size=CHUNK, **more, **self.where)

    def some(self, *names: str) -> dict[str, Tensor]:
        """Some of the tensors, by name."""
        return {name: self.t[name] for name in names}

    def each(self, name: str) -> Tensor:
        """q or k for each head of v."""
        heads = self.t["v"].shape[2] // self.t[name].shape[2]
        return repeated(self.t[name], heads)

    def out(self, v: Tensor, h: Tensor, into: Tensor | None) -> Tensor:
        """out, from what is written (``v``) and the states that enter chunks (``h``)."""
        o, dv = place(into, v), v.shape[-1]
        given: dict[str, Any] = {**self.some("q", "k", "g"), "v": v, "h": h, "o": o}
        given |= {"g_gamma": None, "scale": self.x.scale, "STATE_V_FIRST": False}
        self.launch(
            "common.chunk_o", "chunk_fwd_kernel_o", lambda tuned: -(-dv // tuned["BV"]), **given
        )
        return o.reshape(self.x.v.shape)

    def launch(
        self, module: str, name: str, parts: Callable[[dict[str, int]], int], **given: Any
    ) -> None:
        """Launch a number of blocks for each chunk and head of v: ``parts`` of Triton's tuning."""
        (b, t, h, dk), (hv, dv) = self.t["q"].shape, self.t["v"].shape[2:]
        chunks = -(-t // CHUNK) if self.packed is None else len(self.packed.chunks.values)
        where = {"cu_seqlens": None, "chunk_indices": None, **self.where}
        sizes = {"T": t, "H": h, "HV": hv, "K": dk, "V": dv, "BT": CHUNK}
        stage(module, name)[lambda tuned: (parts(tuned) * chunks, b * hv)](
            **given, **where, **sizes
        )

    def blocks(self, widest: int) -> dict[str, int]:
        """How much of dk and dv each block of a backward takes."""
        sizes = {"BK": self.t["q"].shape[-1], "BV": self.t["v"].shape[-1]}
        return {n: min(max(1 << (size - 1).bit_length(), 16), widest) for n, size in sizes.items()}


def place(into: Tensor | None, like: Tensor) -> Tensor:
    """Where a kernel writes a result like ``like``: ``into`` if possible, else new memory."""
    if into is None or not into.is_contiguous() or into.dtype != like.dtype:
        return torch.empty_like(like)
    return into.view(like.shape) if into.numel() == like.numel() else torch.empty_like(like)


def widest_block(device: torch.device, narrow: bool) -> int:
    """The library's choice by shared memory; ``narrow``: whether all inputs have 16 bits."""
    if shares_memory(device, "hopper") or (narrow and shares_memory(device, "ampere")):
        return 128
    return 64 if shares_memory(device, "ada") else 32


def shares_memory(device: torch.device, arch: str = "none") -> bool:
    """Whether a GPU's blocks have as much shared memory as the library expects of ``arch``."""
    found: bool = importlib.import_module("fla.utils").check_shared_mem(arch, device.index)
    return found
