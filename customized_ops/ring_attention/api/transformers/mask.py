"""What models pass from transformers' mask creation to their attention layers.

    mask function (once a forward, for each kind of mask)  ->  Mask  ->  every layer  ->  BatchMask

What a mask needs from the batch is copied to the host once, by the first layer that asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import Bools, Ints
from ...op.arguments import ArgumentError, checked
from ...op.tokens.lengths import on_host
from .batch_mask import (
    BatchMask,
    BatchTokens,
    batch_mask,
    begins,
    check_ends,
    documents_of,
    host_copy,
    numbered,
    warn_of_part,
)
from .cut import current_cut, running_cut
from .mask_function import TITLE, MaskDescription, read_mask_function


class Mask:
    """Which pairs attend in a forward, for one kind of layer.

    Not a dataclass: FSDP with mixed precision would give every layer a copy of its own, and cast
    the tensors in it.

    Attributes:
        description: windows, chunks and documents.
        batch, q_len, k_len: of the layers' inputs. q_offset, k_offset: positions of the first query
            and the first key in the sequence, which differ with a cache.
        padding: [b, any], the attention_mask that the model was given; None if there is none.
        cut: the cut, if the inputs are a rank's part.
        model_is_known: whether a layer was examined and its model can be cut.
        positions_of_model: the model's position ids while a graph is being captured; some models
            do not pass them to layers.
    """

    ndim = 0  # generate() hands a mask made for a static cache back to the mask functions

    def __init__(
        self,
        description: MaskDescription,
        batch: int,
        q_len: int,
        k_len: int,
        q_offset: Any = 0,
        k_offset: Any = 0,
        padding: Tensor | None = None,
    ) -> None:
        self.description, self.batch, self.q_len, self.k_len = description, batch, q_len, k_len
        # A static cache advances its own tensor of token counts before layers read it: clone it.
        self.q_offset, self.k_offset = (
            each.clone() if isinstance(each, Tensor) else each for each in (q_offset, k_offset)
        )
        self.padding, self.cut, self.model_is_known = padding, current_cut(), False
        self.positions_of_model: Tensor | None = None
        self._by_lengths: dict[bytes | None, BatchMask] = {}

    def contiguous(self) -> Mask:
        """The mask itself; generate() calls this."""
        return self

    def position_ids(self, of_layer: Tensor | None) -> Tensor | None:
        """The position ids that show documents: the mask function's, otherwise the layer's."""
        own = self.description.position_ids
        return of_layer if own is None else own

    def batch_mask(
        self, q: Tensor, k: Tensor, position_ids: Tensor | None, cu_seqlens: Tensor | None
    ) -> BatchMask:
        """The mask of a layer's inputs, made once for all layers.

        Args:
            q, k: [b, l, h, d]. position_ids: [b or 1, l], as the layer got them.
            cu_seqlens: [documents + 1], for a batch of one row, as its data collator made them.
        Raises:
            ArgumentError: the arguments do not fit one another, or are ambiguous.
        """
        key = None if cu_seqlens is None else on_host(cu_seqlens).tobytes()
        if key not in self._by_lengths:
            if (cut := self.cut) is None:
                found = self._of_whole(q, k, position_ids, cu_seqlens)
            else:
                checked(TITLE, cut.group, lambda: self._refuse_of_whole(q, k, cu_seqlens))
                cut.check(q.shape, position_ids)
                found = cut.batch_mask(self.description, q.shape[0])
            self._by_lengths[key] = found
        return self._by_lengths[key]

    def _refuse_of_whole(self, q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> None:
        """Raise for arguments that only whole sequences allow, when the inputs are a part."""
        whole = "pass that of the whole sequence"
        documents = "pass position_ids of the whole sequence, which restart,"
        for name, given, instead in (
            ("attention_mask", self.padding, whole),
            ("cu_seq_lens_q", cu_seqlens, documents),
        ):
            if given is not None:
                raise ArgumentError(
                    f"{TITLE}: {name} does not go with a rank's part of the tokens; {instead} to "
                    "sequence_parallel instead"
                )
        if int(self.q_offset) or q.shape[1] != k.shape[1]:
            raise ArgumentError(
                f"{TITLE}: {q.shape[1]} queries with {k.shape[1]} keys: a cache with tokens in it "
                "does not go with tokens cut over ranks; generate on one rank"
            )

    def _of_whole(
        self, q: Tensor, k: Tensor, position_ids: Tensor | None, cu_seqlens: Tensor | None
    ) -> BatchMask:
        if (q.shape[1], k.shape[1]) != (self.q_len, self.k_len):
            raise ArgumentError(
                f"{TITLE}: the mask is of {self.q_len} queries and {self.k_len} keys, but the "
                f"layer has {q.shape[1]} and {k.shape[1]}"
            )
        given, positions = self.position_ids(position_ids), None
        if given is not None and given.ndim == 2 and self.q_len > 1:
            positions = host_copy(given)
        q_offset, k_offset = int(self.q_offset), int(self.k_offset)
        attended = self._attended(k_offset)
        if positions is not None and not q_offset and self.q_len == self.k_len:
            warn_of_part(positions, attended)
        tokens = BatchTokens(self.q_len, self.k_len, q_offset, k_offset, None, positions, attended)
        if cu_seqlens is None:
            documents = self._documents(tokens)
        else:
            documents = self._documents_by_lengths(cu_seqlens, positions, attended)
        return batch_mask(self.description, replace(tokens, documents=documents), self.batch)

    def _attended(self, offset: int) -> Bools | None:
        """bool[b, k_len], or None if all keys are attended; keys beyond the model's attention_mask
        are not."""
        if self.padding is None:
            return None
        given = host_copy(self.padding)[:, offset : offset + self.k_len] != 0
        attended = np.zeros((len(given), self.k_len), dtype=bool)
        attended[:, : given.shape[1]] = given
        return None if attended.all() else attended

    def _documents(self, tokens: BatchTokens) -> Ints | None:
        """Each key's document number, [b or 1, k_len], from the position ids of the queries."""
        positions, visible = tokens.position_ids, tokens.attended
        if visible is not None and not tokens.queries_are_keys:
            first = tokens.q_offset - tokens.k_offset
            visible = visible[:, first : first + self.q_len]
        if positions is None or not begins(positions, visible).any():
            return None
        if not self.description.causal:
            raise ArgumentError(
                f"{TITLE}: position_ids restart, but the mask is not causal, where transformers "
                "does not look at them; pass where documents begin as cu_seq_lens_q and _k"
            )
        if not tokens.queries_are_keys:
            raise ArgumentError(
                f"{TITLE}: position_ids restart among {self.q_len} queries that have "
                f"{self.k_len} keys: a cache with tokens in it does not show where documents begin"
            )
        return documents_of(positions, tokens.attended)

    def _documents_by_lengths(
        self, cu_seqlens: Tensor, positions: Ints | None, attended: Bools | None
    ) -> Ints:
        ends = on_host(cu_seqlens)
        if self.batch != 1 or self.q_len != self.k_len or attended is not None:
            raise ArgumentError(
                f"{TITLE}: cu_seq_lens_q goes with one row without padding or cache, got "
                f"{self.batch} rows of {self.q_len} queries and {self.k_len} keys"
                + ("" if attended is None else ", and an attention_mask with padding")
            )
        check_ends(TITLE, ends, self.k_len)
        documents = np.repeat(np.arange(len(ends) - 1), np.diff(ends))[None]
        if positions is not None:
            restarts = begins(positions, None)
            if restarts.any() and not np.array_equal(restarts, np.diff(documents) != 0):
                raise ArgumentError(
                    f"{TITLE}: cu_seq_lens_q {ends.tolist()} and position_ids, which restart at "
                    f"{(np.flatnonzero(restarts[0]) + 1).tolist()}, name different documents"
                )
        return numbered(np.diff(documents) != 0)


@torch.compiler.disable  # it reads closures
def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | Mask | None = None,
    use_vmap: bool = False,
    **_: Any,  # what other implementations need to make or omit a dense mask
) -> Mask:
    """The mask function that transformers calls; see ``transformers.masking_utils``.

    Raises:
        NotImplementedError: the mask is not made of windows, chunks and documents.
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    assert mask_function is not None, "transformers names the mask"
    description = read_mask_function(mask_function)
    if use_vmap:
        raise NotImplementedError(
            f"{TITLE}: the model changes its mask by a function of its own; use "
            "attn_implementation='eager' or 'sdpa'"
        )
    return Mask(description, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask)


def maskless(q: Tensor, k: Tensor, causal: bool, window: int | None) -> Mask:
    """The mask for layers of models that make none, such as image encoders. Ambiguous cases are
    refused. ``window`` counts the token itself, as in flash attention."""
    if current_cut() is not None:
        raise ArgumentError(
            f"{TITLE}: a layer without a mask inside sequence_parallel: its model makes none, so "
            "it is not known whether its tokens are those that are cut"
        )
    q_len, k_len = q.shape[1], k.shape[1]
    if causal and q_len != k_len and q_len > 1:
        raise ArgumentError(
            f"{TITLE}: a causal layer without a mask has {q_len} queries and {k_len} keys, and "
            "it is not known which of the keys are the queries' own"
        )
    left = -1 if window is None else window - 1
    description = MaskDescription(left, 0 if causal else left)
    return Mask(description, q.shape[0], q_len, k_len, k_len - q_len)


def leave_documents_to_cut() -> None:
    """Skip transformers' own search for documents where tokens are cut over ranks: it waits for
    the device, and on a part of the tokens its result means nothing."""
    from transformers import masking_utils

    original = masking_utils.find_packed_sequence_indices

    def find(position_ids: Tensor) -> Tensor | None:
        return original(position_ids) if running_cut() is None else None

    find._seqshard = True  # type: ignore[attr-defined]
    if not hasattr(original, "_seqshard"):
        masking_utils.find_packed_sequence_indices = find


def is_traced(q: Tensor) -> bool:
    """Whether a graph is being captured, where nothing can be read on the host."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(q, FakeTensor) or torch.compiler.is_exporting()
