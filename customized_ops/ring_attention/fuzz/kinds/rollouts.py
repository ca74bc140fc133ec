"""Cases of packed rollouts: a layer over the tree of their prefixes, and their log-probs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from ....chunk_linear_cross_entropy import chunk_linear_cross_entropy
from ...core.mask import AttnMask
from ...masked_attn import wrap_masked_attn_func
from ...rollouts import PackedRollouts, pack_rollouts
from ..specification import dense_attention
from . import sequences
from .distributed_case import SUMMED, WHOLE, DistributedCase, Place

WIDTH, HEADS, HEAD_DIM = 4, 2, 3


@dataclass(frozen=True)
class RolloutsCase(DistributedCase):
    """Token and position -> attention over the tree -> logits -> a policy-gradient loss, and for
    each rollout the sum of its log-probs, each times a weight of the rollout's own.

    Attributes:
        rollouts: token ids. prompts: how many of each rollout's first tokens are not targets.
        mean: that of the loss. share: whether shared prefixes are packed once.
        chunked: log-probs by :func:`chunk_linear_cross_entropy`, otherwise from logits.
    """

    rollouts: tuple[tuple[int, ...], ...]
    prompts: tuple[int, ...]
    mean: str | None = None
    share: bool = True
    chunked: bool = False

    SIMPLER: ClassVar[tuple[str, ...]] = ("chunked", "mean", "layout", "share", "seed")
    RESULTS: ClassVar[tuple[str, ...]] = ("loss", "log_probs")

    @cached_property
    def packed(self) -> PackedRollouts:
        """The rollouts as one sequence."""
        return pack_rollouts(self.rollouts, self.prompts, share=self.share)

    @property
    def vocabulary(self) -> int:
        """The number of token ids; each id is less than this."""
        return 1 + max((token for row in self.rollouts for token in row), default=0)

    @property
    def rows(self) -> int:
        return sum(map(len, self.rollouts))

    def arguments(self) -> dict[str, Tensor]:
        """The layer's parameters."""
        normal, longest = self.normal(), max(map(len, self.rollouts))
        inner = HEADS * HEAD_DIM
        given = {"tokens": normal(self.vocabulary, WIDTH), "positions": normal(longest, WIDTH)}
        given |= {name: normal(WIDTH, inner) for name in "qkv"}
        given["head"] = normal(self.vocabulary, inner)
        return given

    def _constants(self) -> tuple[Tensor, Tensor]:
        """Advantages of rollouts, and the weight of each token's log-prob."""
        normal = self.normal(1)
        return normal(len(self.rollouts)), normal(self.rows)

    def upstream(self) -> dict[str, Tensor]:
        normal = self.normal(2)
        return {"loss": normal(), "log_probs": normal(len(self.rollouts))}

    def places(self, ranks: int) -> dict[str, Place]:
        """Parameters are whole, and results are added up."""
        parameters = dict.fromkeys(("tokens", "positions", "q", "k", "v", "head"), WHOLE)
        return {**parameters, **dict.fromkeys(self.RESULTS, SUMMED)}

    def call_on_rank(
        self, given: Mapping[str, Tensor], rank: int, ranks: int, group: Any
    ) -> tuple[Tensor, ...]:
        """The layer on a rank's part of the tree."""
        layout = sequences.layout_of(self.layout, len(self.packed.tokens), ranks)
        part = self.packed.part(layout, rank).to(self.device)
        x = given["tokens"][part.tokens] + given["positions"][part.positions]
        q, k, v = ((x @ given[n]).view(1, len(x), HEADS, HEAD_DIM) for n in "qkv")
        hidden = wrap_masked_attn_func(q, k, v, part.mask, layout=part.layout, process_group=group)
        assert isinstance(hidden, Tensor)
        hidden = hidden[0].flatten(1)
        if self.chunked:
            rows = hidden[part.rows], given["head"], part.targets
            losses = chunk_linear_cross_entropy(*rows, chunk_size=3, reduction="none")
            assert isinstance(losses, Tensor)
            log_probs = -losses
        else:
            log_probs = part.log_probs(hidden @ given["head"].t())
        advantages, counted = self._constants()
        loss = part.loss(log_probs, part.of_rollouts(advantages), self.mean)
        return loss, part.sums(part.of_targets(log_probs) * part.of_tokens(counted))

    def specification(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The layer on each rollout alone."""
        advantages, counted = (t.cpu() for t in self._constants())
        counts = [
            max(0, len(r) - max(p, 1)) for r, p in zip(self.rollouts, self.prompts, strict=True)
        ]
        loss, sums = torch.zeros((), dtype=torch.float64), []
        of_each = counted.split([len(row) for row in self.rollouts])
        for n, row in enumerate(self.rollouts):
            log_probs = self._alone(given, row)[len(row) - counts[n] :]
            shares = {None: 1, "token": sum(counts), "rollout": counts[n] * len(counts)}
            loss = loss - log_probs.sum() * advantages[n] / max(shares[self.mean], 1)
            sums.append((log_probs * of_each[n][len(row) - counts[n] :]).sum())
        return loss, torch.stack(sums)

    def _alone(self, given: Mapping[str, Tensor], row: tuple[int, ...]) -> Tensor:
        """The log-prob of each token of a rollout, 0 for the first."""
        tokens = torch.tensor(row, dtype=torch.int64)
        x = given["tokens"][tokens] + given["positions"][: len(row)]
        q, k, v = ((x @ given[n]).view(1, len(row), HEADS, HEAD_DIM) for n in "qkv")
        mask = AttnMask.causal(len(row))
        out = dense_attention(q, k, v, mask, HEAD_DIM**-0.5)[0][0].flatten(1)
        each = (out @ given["head"].t()).log_softmax(-1)
        return F.pad(each[:-1].gather(1, tokens[1:, None])[:, 0], (min(len(row), 1), 0))

    def fewer(self) -> Iterator[Self]:
        """Cases without one rollout, or with one of them shortened."""
        for n, (row, prompt) in enumerate(zip(self.rollouts, self.prompts, strict=True)):
            for kept in ((), (row[: len(row) // 2],), (row[:-1],)):
                rollouts = (*self.rollouts[:n], *kept, *self.rollouts[n + 1 :])
                prompts = [min(prompt, len(each)) for each in kept]
                given = (*self.prompts[:n], *prompts, *self.prompts[n + 1 :])
                if any(rollouts) and rollouts != self.rollouts:
                    yield replace(self, rollouts=rollouts, prompts=given)


def drawn(random: Random, ranks: int) -> RolloutsCase:
    """A layer over this many ranks. Rollouts continue others, also from the middle. Always in fp64:
    after so many steps in lower precision, one run says little about the error of another."""
    vocabulary, rollouts, prompts = random.randint(1, 6), list[tuple[int, ...]](), list[int]()
    for _ in range(random.randint(1, 9)):
        begin = random.choice(rollouts) if rollouts and random.random() < 0.8 else ()
        begin = begin[: random.randint(0, len(begin))]
        rollouts.append((*begin, *random.choices(range(vocabulary), k=random.randint(0, 12))))
        prompts.append(random.randint(0, len(rollouts[-1])))
    rollouts[0] = rollouts[0] or (0,)
    case = RolloutsCase(
        tuple(rollouts),
        tuple(prompts),
        mean=random.choice(["token", "rollout", None]),
        share=random.random() < 0.8,
        chunked=random.random() < 0.3,
        seed=random.randrange(1000),
    )
    mask = case.packed.mask
    return replace(case, layout=sequences.layout(random, mask, mask.q_len, ranks))
