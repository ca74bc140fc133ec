"""Cases of ops along a sequence, such as a recurrence: a batch, or packed documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from typing_extensions import Self

from ...core.layout import Layout
from ...core.mask import AttnMask
from . import sequences
from .distributed_case import DistributedCase, Place, cut


@dataclass(frozen=True)
class AlongSequenceCase(DistributedCase):
    """One call on [b, l, ...].

    Attributes:
        cu_seqlens: cumulative lengths of documents; () for a batch of whole sequences.
    """

    length: int
    batch: int = 1
    cu_seqlens: tuple[int, ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """Where the documents, or the only document, begin and end."""
        return self.cu_seqlens or (0, self.length)

    @property
    def tokens(self) -> tuple[int, int]:
        """The first two dims of tensors."""
        return self.batch, self.length

    @property
    def rows(self) -> int:
        return self.batch * self.length

    def policies(self, ranks: int) -> list[str]:
        """Policies that cut tokens or the batch."""
        tokens = ["cp"] if self.length >= ranks else []
        return ["auto", *tokens, *(["dp"] if self.batch >= ranks else [])]

    def by_tokens(self, ranks: int) -> Place:
        """The place of tensors that are cut by tokens."""
        return cut(sequences.layout_of(self.layout, self.length, ranks), 1)

    def where(self, ranks: int, group: Any) -> dict[str, Any]:
        """Arguments of the function that say where tokens are. The default shards are passed
        without a layout, so that calls with and without one are tried."""
        layout = sequences.layout_of(self.layout, self.length, ranks)
        usual = layout == Layout.contiguous(self.length, ranks)
        return {
            "cu_seqlens": list(self.cu_seqlens) or None,
            "process_group": group,
            "layout": None if usual and len(set(layout.sizes)) == 1 else layout,
        }

    def fewer(self) -> Iterator[Self]:
        """Cases with fewer tokens."""
        for tokens in sequences.fewer_tokens(self.length, self.cu_seqlens):
            yield replace(self, **tokens)


def drawn(random: Random, ranks: int) -> dict[str, Any]:
    """The fields that these cases share."""
    ends = sequences.documents(random) if random.random() < 0.5 else ()
    length = ends[-1] if ends else sequences.length(random)
    mask = AttnMask.varlen(ends or (0, length), causal=True)
    zigzag = Layout.zigzag(length, ranks, ends).spec if ends and sequences.rarely(random) else None
    return {
        "length": length,
        "cu_seqlens": ends,
        "batch": 1 if ends else random.choice([1, 1, 2, 3]),
        "layout": zigzag or sequences.layout(random, mask, length, ranks),
        "strided": sequences.rarely(random),
        "dtype": random.choice(sequences.DTYPES),
        "seed": random.randrange(1000),
    }
