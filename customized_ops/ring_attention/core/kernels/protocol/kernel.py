"""What a kernel is: attention over slices on one device. Also what it is given and returns."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ...mask.slices import Slices
from .request import Capabilities
from .scoring import Scoring, Tokens

T = TypeVar("T")
OutLse = tuple[Tensor, Tensor]
Grads = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


class HostKey(NamedTuple):
    """A key of :meth:`Pairs.made` whose value holds nothing on a device, so that both are pickled
    with a plan."""

    what: str
    options: tuple[Hashable, ...] = ()


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs that a kernel call attends. One object serves every call of a plan's stage, so what
    a kernel works out from it (calls, block lists, index tensors) is worked out once.

    Attributes:
        slices: int64[n, 6], normalised and disjoint; they index rows of q and k.
        q_len, k_len: tokens of q and k, attended or not.
    """

    slices: Slices
    q_len: int
    k_len: int
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the pairs with what was worked out without a device."""
        made = {key: value for key, value in self._made.items() if isinstance(key, HostKey)}
        return Pairs, (self.slices, self.q_len, self.k_len, made)

    def made(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returned the first time that ``key`` was asked for."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def known(self, key: Hashable) -> Any:
        """What was made for ``key``; None if nothing was."""
        return self._made.get(key)


class ForwardOperands(NamedTuple):
    """The tensors that a forward is given; shapes are those of :class:`Kernel`.

    Packed sequences have no b: see :class:`~..window.library_calls.Packing`.
    """

    q: Tensor
    k: Tensor
    v: Tensor

    def part(self, rows: slice, keys: slice) -> ForwardOperands:
        """Some of the rows and some of the keys, as views."""
        return ForwardOperands(self.q[:, rows], self.k[:, keys], self.v[:, keys])


class BackwardOperands(NamedTuple):
    """The gradient of out, what the forward was given, and what it returned.

    Attributes:
        dout, out: [b, i, h, e]. q: [b, i, h, d]. k: [b, j, g, d]. v: [b, j, g, e].
        lse: [b, h, i]. Like out it is final: over all keys of a row, not only over those in k.
        dlse: [b, h, i], the gradient of the final lse, in lse's dtype; None for 0.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dlse: Tensor | None = None

    def part(self, rows: slice, keys: slice) -> BackwardOperands:
        """Some of the rows and some of the keys, as views."""
        dout, q, out = [t[:, rows] for t in (self.dout, self.q, self.out)]
        dlse = None if self.dlse is None else self.dlse[..., rows]
        return BackwardOperands(
            dout, q, self.k[:, keys], self.v[:, keys], out, self.lse[..., rows], dlse
        )


class Kernel(Protocol):
    """A module or an object that attends. Importing it imports no optional package.

    Shapes: q [b, i, h, d], k [b, j, g, d], v [b, j, g, e] with h a multiple of g (grouped-query
    attention: query head n reads kv head n // (h / g)). Only i and j may be 0. Strides are free,
    but d and e are dense, and the rows of a tensor that is not contiguous start at multiples of 16
    bytes. ``pairs`` counts rows of q and k; rows that no slice covers give out 0 and lse -inf.
    ``tokens`` may be None unless ``scoring.needs_tokens``. Some kernels wait for the GPU: the
    reference, which copies the mask of each block there; and "flex" and "cudnn_flex", once for new
    pairs.

    A kernel may have further functions. ``tables(pairs) -> list[IndexTable]`` is what its calls
    for these pairs read on the device, so that it can be sent there ahead, with the tables of other
    calls. ``prepare(pairs)`` works out, under :class:`HostKey`, what the kernel needs of the pairs
    without a device; it is called where batches are planned ahead. ``watched()`` is a context in
    which calls may be recorded: all that the kernel then does to the device is done by the
    functions of :mod:`...tape`, or by a library as :func:`...tape.call_library` sees it, and what
    it decides depends on ``pairs``, ``scoring``, and the tensors' shapes, strides and dtypes alone.
    ``alike(given, pairs, deterministic=...)`` returns the kind of a call, and tensors that it reads
    besides ``given``. For all pairs of a kind these have the same shapes, dtypes and alignment, and
    what the call does to the device depends on nothing else of the pairs. It returns None where it
    may depend on more.
    """

    NAME: str
    CAPABILITIES: tuple[Capabilities, ...]  # one for each type of device

    def missing(self) -> str | None:
        """What keeps the kernel from running on this machine, or None."""

    def forward(
        self, given: ForwardOperands, pairs: Pairs, scoring: Scoring, tokens: Tokens | None
    ) -> OutLse:
        """out [b, i, h, e] (q's dtype or wider) and lse [b, h, i] (fp32, fp64 for fp64) of these
        pairs alone: k may be a part of a row's keys, to be merged with others. The same bit for bit
        from run to run."""

    def backward(
        self,
        given: BackwardOperands,
        pairs: Pairs,
        scoring: Scoring,
        tokens: Tokens | None,
        *,
        deterministic: bool = False,
    ) -> Grads:
        """dq, dk, dv of these pairs, in the inputs' dtypes or wider: the executor adds them up over
        stages and ranks. ``deterministic`` asks for the same bits from run to run."""
