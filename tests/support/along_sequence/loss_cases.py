"""Calls of the chunked loss, whole and in parts, and what torch's own cross entropy says to them.

Results are always: loss, lse, gradients of hidden, weight and, where there is one, bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from dense import assert_same
from torch import Tensor

from customized_ops.chunk_linear_cross_entropy import chunk_linear_cross_entropy
from customized_ops.ring_attention.core.comm import Comm, inprocess
from customized_ops.ring_attention.core.comm.inprocess import InProcessComm, World, run_ranks


class Place(NamedTuple):
    """A rank among those that something is cut over."""

    rank: int = 0
    parts: int = 1
    group: Any = None


WHOLE = Place()


@dataclass(frozen=True)
class LossCase:
    """One call.

    Attributes:
        ignored: which tokens are left out: none, some, all, or all but the last quarter, which are
            then all on the last ranks.
        barred: of so many last rows the bias is -inf, as of a vocabulary that is padded.
        barred_targets: whether targets are among these rows too.
    """

    tokens: tuple[int, ...]
    vocab: int = 11
    width: int = 5
    ignored: str = "some"
    bias: bool = False
    softcap: float = 0.0
    reduction: str = "mean"
    chunk_size: int | None = 3
    ignore_index: int = -100
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    barred: int = 0
    barred_targets: bool = False

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """hidden, weight, target and bias."""
        g = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Tensor:
            made = torch.randn(shape, generator=g, dtype=torch.float64)
            return made.to(self.dtype).to(self.device)

        hidden, weight = normal(*self.tokens, self.width), normal(self.vocab, self.width)
        allowed = self.vocab if self.barred_targets else self.vocab - self.barred
        target = torch.randint(allowed, self.tokens, generator=g)
        match self.ignored:
            case "some":
                left_out = torch.rand(self.tokens, generator=g) < 0.4
            case "all":
                left_out = torch.ones(self.tokens, dtype=torch.bool)
            case "but last":
                left_out = torch.zeros(self.tokens, dtype=torch.bool)
                left_out[..., : self.tokens[-1] * 3 // 4] = True
            case "none":
                left_out = torch.zeros(self.tokens, dtype=torch.bool)
        target = target.masked_fill(left_out, self.ignore_index).to(self.device)
        bias = normal(self.vocab) if self.bias else None
        if bias is not None:
            bias[self.vocab - self.barred :] = -torch.inf
        return hidden, weight, target, bias

    def upstream(self) -> tuple[Tensor, Tensor]:
        """Gradients of loss and lse."""
        g = torch.Generator().manual_seed(4)
        shape = self.tokens if self.reduction == "none" else ()
        made = [torch.randn(s, generator=g, dtype=torch.float64) for s in (shape, self.tokens)]
        return made[0].to(self.device), made[1].to(self.device)

    def call(self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Any, **where: Any) -> Any:
        """The op under test: loss and lse."""
        return chunk_linear_cross_entropy(
            hidden,
            weight,
            target,
            bias=bias,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            softcap=self.softcap,
            chunk_size=self.chunk_size,
            return_lse=True,
            **where,
        )

    def dense(self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Any) -> Any:
        """The same in plain torch, over all logits, in the dtype of the inputs up to them."""
        logits = F.linear(hidden, weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        loss = F.cross_entropy(
            logits.flatten(0, -2),
            target.flatten(),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )
        nothing = self.reduction == "mean" and bool((target == self.ignore_index).all())
        loss = logits.sum() * 0 if nothing else loss  # torch's mean of nothing is NaN
        return loss.view(target.shape) if self.reduction == "none" else loss, logits.logsumexp(-1)


def results(
    case: LossCase, function: Callable[..., Any], given: Sequence[Any], douts: Sequence[Tensor]
) -> list[Tensor]:
    """loss, lse and gradients of a call of ``function`` on ``given``."""
    hidden, weight, target, bias = given
    leaves = [t.detach().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    outs = function(leaves[0], leaves[1], target, leaves[2] if case.bias else None)
    total = sum((out * dout).sum() for out, dout in zip(outs, douts, strict=True))
    return [*(out.detach() for out in outs), *torch.autograd.grad(total, leaves)]


def expected(case: LossCase) -> list[Tensor]:
    """In plain torch, in fp64, from the case's rounded inputs."""
    given = [t.cpu() if t is not None else None for t in case.tensors()]
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in given]
    return results(case, case.dense, wide, [t.cpu() for t in case.upstream()])


def shard(t: Tensor, dim: int, place: Place) -> Tensor:
    """As DTensor's ``Shard`` cuts."""
    each = -(-t.shape[dim] // place.parts)
    first = min(place.rank * each, t.shape[dim])
    return t.narrow(dim, first, min(each, t.shape[dim] - first))


def parts_of(case: LossCase, tokens: Place, vocab: Place) -> tuple[Any, Any, dict[str, Any]]:
    """One rank's part of the inputs and of the gradients of results, and the groups to name."""
    hidden, weight, target, bias = case.tensors()
    along = target.ndim - 1
    hidden, target = shard(hidden, along, tokens), shard(target, along, tokens)
    weight, bias = (None if t is None else shard(t, 0, vocab) for t in (weight, bias))
    dloss, dlse = case.upstream()
    dloss = shard(dloss, along, tokens) if dloss.ndim else dloss
    where: dict[str, Any] = {}
    if vocab.group is not None:
        where |= {"vocab_group": vocab.group, "vocab_size": case.vocab}
    if tokens.group is not None and case.reduction == "mean":
        where |= {"token_group": tokens.group}
    return (hidden, weight, target, bias), (dloss, shard(dlse, along, tokens)), where


def run_part(case: LossCase, tokens: Place = WHOLE, vocab: Place = WHOLE) -> list[Tensor]:
    """Results of one rank's part of the tokens and of the vocabulary."""
    given, douts, where = parts_of(case, tokens, vocab)
    return results(case, lambda *tensors: case.call(*tensors, **where), given, douts)


def assemble(case: LossCase, parts: Sequence[Sequence[list[Tensor]]]) -> list[Tensor]:
    """Whole results from those of each rank, ``parts[token rank][vocab rank]``."""
    for row in parts:
        for other in row[1:]:
            for name, n in (("loss", 0), ("lse", 1), ("hidden", 2)):
                assert_same(f"{name} on two ranks of the vocabulary", other[n], row[0][n])
    first = [row[0] for row in parts]
    losses = [part[0] for part in first]
    loss = torch.cat(losses, -1) if case.reduction == "none" else torch.stack(losses).sum(0)
    whole = [loss, torch.cat([p[1] for p in first], -1), torch.cat([p[2] for p in first], -2)]
    for n in range(3, len(first[0])):  # rows of weight and bias: tokens' parts added up
        whole.append(torch.cat([sum(r[n] for r in column) for column in zip(*parts, strict=True)]))
    return whole


def run_grid(case: LossCase, token_ranks: int, vocab_ranks: int) -> list[Tensor]:
    """Whole results from ``token_ranks`` x ``vocab_ranks`` ranks in one process."""
    columns = [World(token_ranks) for _ in range(vocab_ranks)]
    rows = [World(vocab_ranks) for _ in range(token_ranks)]
    inprocess._worlds.update({world.name: world for world in (*columns, *rows)})

    def group(world: World, rank: int) -> Comm:
        world.local.comm = InProcessComm(world, rank)
        return world.local.comm

    def body(comm: Comm) -> list[Tensor]:
        i, j = divmod(comm.rank, vocab_ranks)
        tokens = Place(i, token_ranks, group(columns[j], i))
        return run_part(case, tokens, Place(j, vocab_ranks, group(rows[i], j)))

    try:
        flat = run_ranks(token_ranks * vocab_ranks, body)
    finally:
        for world in (*columns, *rows):
            del inprocess._worlds[world.name]
    return assemble(case, [flat[i * vocab_ranks :][:vocab_ranks] for i in range(token_ranks)])


def check(name: str, case: LossCase, got: Sequence[Tensor], tolerance: float = 1e-10) -> None:
    """``got`` is what plain torch says, to ``tolerance``."""
    names = ("loss", "lse", "dhidden", "dweight", "dbias")
    for what, a, b in zip(names, got, expected(case), strict=False):
        assert_same(f"{name}: {what}", a.cpu(), b, tolerance)
    assert len(got) == 4 + case.bias
