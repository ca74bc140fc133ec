"""Reading the mask functions of transformers: which pairs attend, from the functions' closures.

transformers describes a mask as a function of (batch, head, query, key), made of a few known parts
(``transformers.masking_utils``). Nothing is evaluated here: each part is recognized by its name,
its numbers are read from its closure, and an unknown part is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

TITLE = "seqshard attention"


@dataclass(frozen=True, eq=False)
class MaskDescription:
    """A mask as transformers describes it: which pairs attend, except for padding.

    Attributes:
        left, right: keys before and after a token's own that it may attend to; -1 is no bound.
        chunk: number of tokens of a chunk, which attend to no other chunk; 0 for none.
        left_padding: [b], where the first chunk starts.
        position_ids: [b, l], from which documents are found; None for those of the layers.
    """

    left: int = -1
    right: int = -1
    chunk: int = 0
    left_padding: Tensor | None = None
    position_ids: Tensor | None = None

    @property
    def causal(self) -> bool:
        """Whether no token attends to a later one."""
        return self.right == 0


def read_mask_function(mask_function: Callable[..., Any]) -> MaskDescription:
    """The description of a mask that a function of ``transformers.masking_utils`` defines. Parts of
    a model's own, and blocks of tokens that attend to one another, are refused."""
    found: dict[str, Any] = {}
    _read(mask_function, found)
    return MaskDescription(**found)


def _read(function: Callable[..., Any], found: dict[str, Any]) -> None:
    name = getattr(function, "__qualname__", repr(function)).split(".<locals>")[0]
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        raise NotImplementedError(
            f"{TITLE}: the mask has a part of the model's own, {name}, which cannot be expressed "
            "as windows and documents; use attn_implementation='eager' or 'sdpa'"
        )
    held = inspect.getclosurevars(function).nonlocals
    if name == "and_masks":
        for part in held["mask_functions"]:
            _read(part, found)
    elif name == "causal_mask_function":
        found["right"] = 0
    elif name in ("bidirectional_mask_function", "packed_sequence_mask_function"):
        pass  # documents are found from position ids, as in transformers
    elif name == "sliding_window_overlay":
        found["left"] = held["sliding_window"] - 1
    elif name == "sliding_window_bidirectional_overlay":
        found["left"] = found["right"] = held["sliding_window"]
    elif name == "chunked_overlay":
        found |= {"chunk": held["chunk_size"], "left_padding": held["left_padding"]}
    elif name == "remap_positions_for_packed_sequence":
        found["position_ids"] = held["position_ids"]
        _read(held["mask_function"], found)
    else:
        raise NotImplementedError(
            f"{TITLE}: the mask has a part, {name}, which cannot be expressed as windows and "
            "documents; use attn_implementation='eager' or 'sdpa'"
        )
