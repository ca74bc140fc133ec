"""What flash-linear-attention's stages have in common, for a decay a head: chunks by themselves.

The library works on logs to the base 2 of decays, summed up within a chunk.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

from torch import Tensor

from ...along_sequence.packed_sequences import CHUNK
from .fla_calls import flat, repeated
from .protocol import Operands

OPS = "fla.ops"


def stage(module: str, name: str) -> Any:
    """The library's function."""
    return getattr(importlib.import_module(f"{OPS}.{module}"), name)


class Chunks:
    """What does not depend on states.

    Attributes:
        t: tensors of tokens, with g as the library has it.
        packed: None where each entry of the batch is one segment.
        where: arguments of all functions: which tokens are whose.
        offsets: for those of states, the first chunk of each packed sequence; the library would
            remember its own, on whichever stream they were made.
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
        """Summed up within chunks."""
        return stage("utils", "chunk_local_cumsum")(g, chunk_size=CHUNK, **more, **self.where)

    def some(self, *names: str) -> dict[str, Tensor]:
        """Tensors by name."""
        return {name: self.t[name] for name in names}

    def each(self, name: str) -> Tensor:
        """q or k for each head of v."""
        heads = self.t["v"].shape[2] // self.t[name].shape[2]
        return repeated(self.t[name], heads)
