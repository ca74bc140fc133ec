"""What each kind of case defines, and how ranks run any of them, in-process or as real ranks.

A kind is a frozen dataclass. Its fields describe a call, whose values follow from ``seed``. A kind
defines the arguments, where their parts lie, which function is called, and its specification:

    arguments  -- part of a rank -->  call_on_rank  -- all ranks' parts, joined -->  equal
               -- whole, in fp64 ->  specification  ------------------------------>
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from ...core.layout import Layout

# How ranks hold a tensor: which of its entries along a dim each rank has; or one of these.
SAME = "same"  # every rank has the whole
TERMS = "terms"  # every rank has a term of a sum, which is the tensor
Where = tuple[Layout, int] | str


@dataclass(frozen=True)
class Place:
    """How ranks hold a tensor that a call takes or returns, and how they hold its gradient."""

    value: Where
    gradient: Where


WHOLE = Place(SAME, TERMS)  # such as a weight: users add up its gradients
ALIKE = Place(SAME, SAME)
SUMMED = Place(TERMS, SAME)  # such as a loss of a rank's tokens


def cut(layout: Layout, dim: int) -> Place:
    """The place of a tensor whose tokens lie in a layout along ``dim``."""
    return Place((layout, dim), (layout, dim))


def part_of(whole: Tensor, where: Where, rank: int, ranks: int) -> Tensor:
    """A rank's part of a tensor. Terms differ between ranks, in the ratio 1 : 2 : 3 : ..."""
    if where == SAME:
        return whole.clone()
    if isinstance(where, str):
        return whole * (2 * (rank + 1) / (ranks * (ranks + 1)))
    return where[0].shard(whole, rank, where[1])


def joined(name: str, parts: Sequence[Tensor], where: Where) -> Tensor:
    """The whole tensor from the parts of all ranks; raises AssertionError if parts that should be
    the same differ."""
    if where == SAME:
        others = [n for n, each in enumerate(parts) if not torch.equal(each, parts[0])]
        assert not others, f"{name} of ranks {others} is not that of rank 0"
        return parts[0]
    if isinstance(where, str):
        return torch.stack(list(parts)).sum(0)
    return where[0].unshard(list(parts), where[1])


@dataclass(frozen=True)
class DistributedCase(ABC):
    """One call of a function on one global problem.

    Attributes:
        layout: where tokens lie: the text of a layout, or a kind of it, for any number of ranks.
        strided: whether the last dim of arguments is not dense.
    """

    layout: str | None = field(default=None, kw_only=True)
    strided: bool = field(default=False, kw_only=True)
    dtype: torch.dtype = field(default=torch.float64, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    device: str = field(default="cpu", kw_only=True)

    # Fields that shrinking sets to their defaults, in this order. The text of a layout is for one
    # length, so it is reset before lengths are changed.
    SIMPLER: ClassVar[tuple[str, ...]] = ()
    RESULTS: ClassVar[tuple[str, ...]]  # names of what the function returns
    PARAMETERS: ClassVar[tuple[str, ...]] = ()  # arguments without tokens, such as a filter

    @abstractmethod
    def arguments(self) -> dict[str, Tensor]:
        """Whole tensors by name."""

    @abstractmethod
    def upstream(self) -> dict[str, Tensor]:
        """Gradients of results by name, for results that have one."""

    @abstractmethod
    def places(self, ranks: int) -> dict[str, Place]:
        """The place of each argument and result."""

    @abstractmethod
    def call_on_rank(
        self, given: Mapping[str, Tensor], rank: int, ranks: int, group: Any
    ) -> Sequence[Tensor]:
        """The function on a rank's part of the arguments."""

    @abstractmethod
    def specification(self, given: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """The results for whole arguments in fp64, computed in plain torch."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """How many terms there are where ranks add up over tokens."""

    @abstractmethod
    def fewer(self) -> Iterator[Self]:
        """Smaller cases, the largest steps first; some may not be valid."""

    @property
    def on_one_device(self) -> Self:
        """The case without layouts, which depend on the number of ranks."""
        return replace(self, layout=None)

    @property
    def in_a_layer(self) -> Self:
        """The case in a form for ``parallelize``, which itself knows the ranks and sets layouts."""
        return replace(self.on_one_device, strided=False, dtype=torch.float64)

    def policies(self, ranks: int) -> list[str]:
        """The policies that can split the call over this many ranks."""
        return ["auto"]

    @property
    def result_names(self) -> tuple[str, ...]:
        """The names in RESULTS that this call returns."""
        return self.RESULTS

    def normal(self, stream: int = 0) -> Callable[..., Tensor]:
        """A function that draws tensors of a shape; each stream draws different values."""
        generator = torch.Generator().manual_seed(3 * self.seed + stream)

        def made(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            return x.to(self.dtype).to(self.device)

        return made

    def run_rank(self, rank: int, ranks: int, group: Any) -> list[Tensor]:
        """What one rank computes: its parts of the results and of all gradients."""
        places, given = self.places(ranks), self.arguments()
        parts = {n: part_of(t, places[n].value, rank, ranks) for n, t in given.items()}
        leaves = {n: self._leaf(t) for n, t in _floating(parts).items()}
        results = self.call_on_rank({**parts, **leaves}, rank, ranks, group)
        upstream = {
            n: part_of(t, places[n].gradient, rank, ranks) for n, t in self.upstream().items()
        }
        return self._with_gradients(results, leaves, upstream)

    def compared(self, ranks: int) -> dict[str, Where]:
        """The names of what is compared, and how ranks hold it: results, then gradients."""
        places = self.places(ranks)
        results = {name: places[name].value for name in self.result_names}
        gradients = {f"d{name}": places[name].gradient for name in _floating(self.arguments())}
        return results | gradients

    def gather(self, per_rank: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Whole results and gradients, joined from those of every rank."""
        where, columns = self.compared(len(per_rank)), zip(*per_rank, strict=True)
        named = zip(where.items(), columns, strict=True)
        return [joined(name, parts, place) for (name, place), parts in named]

    def expected(self) -> list[Tensor]:
        """The results and gradients by the specification."""
        given, upstream = (
            {n: t.cpu().double() if t.is_floating_point() else t.cpu() for n, t in each.items()}
            for each in (self.arguments(), self.upstream())
        )
        leaves = {n: t.requires_grad_() for n, t in _floating(given).items()}
        return self._with_gradients(self.specification({**given, **leaves}), leaves, upstream)

    def smaller(self) -> Iterator[Self]:
        """Cases that are simpler in one respect, the largest steps first."""
        defaults: dict[str, Any] = {f.name: f.default for f in fields(self)}
        for name in self.SIMPLER:
            if getattr(self, name) != defaults[name]:
                yield replace(self, **{name: defaults[name]})
        if self.layout is not None and ":" in self.layout:
            yield replace(self, layout="zigzag")
        yield from self.fewer()

    def _leaf(self, given: Tensor) -> Tensor:
        if self.strided and given.ndim > 1:
            given = given.transpose(-2, -1).contiguous().transpose(-2, -1)
        return given.detach().requires_grad_()

    def _with_gradients(
        self,
        results: Sequence[Tensor],
        leaves: Mapping[str, Tensor],
        upstream: Mapping[str, Tensor],
    ) -> list[Tensor]:
        by_name = dict(zip(self.result_names, results, strict=True))
        grads = torch.autograd.grad(
            [by_name[name] for name in upstream],
            list(leaves.values()),
            list(upstream.values()),
            materialize_grads=True,
        )
        return [t.detach() for t in (*results, *grads)]


def _floating(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
