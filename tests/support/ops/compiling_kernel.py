"""A kernel that compiles for each kind of call when it is first met, as flash-attn-4 does: the
reference, which notes what it would compile."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from customized_ops.ring_attention.core.kernels import BackwardOperands, ForwardOperands, Scoring
from customized_ops.ring_attention.core.kernels.adapters import reference

Kind = tuple[Any, ...]
_numbers = count()


class CompilingKernel:
    """``kinds``: what it has compiled so far, by query heads to a key head among others;
    ``windows``: whether it was asked to warm up for windows."""

    CAPABILITIES = reference.CAPABILITIES

    def __init__(self) -> None:
        self.NAME = f"compiling {next(_numbers)}"  # choices are cached by name
        self.kinds: set[Kind] = set()
        self.windows: set[bool] = set()

    def missing(self) -> str | None:
        return None

    def compiled(self) -> int:
        return len(self.kinds)

    def forward(
        self, given: ForwardOperands, pairs: Any, scoring: Scoring, tokens: Any = None
    ) -> Any:
        self._compile("forward", given, scoring)
        return reference.forward(given, pairs, scoring, tokens)

    def backward(
        self,
        given: BackwardOperands,
        pairs: Any,
        scoring: Scoring,
        tokens: Any = None,
        *,
        deterministic: bool = False,
    ) -> Any:
        self._compile("backward", given, scoring, deterministic, given.dlse is None)
        return reference.backward(given, pairs, scoring, tokens, deterministic=deterministic)

    def warm_up(
        self, given: BackwardOperands, scoring: Scoring, *, window: bool, deterministic: bool
    ) -> Iterator[None]:
        self.windows.add(window)
        self._compile("forward", given, scoring)
        yield
        self._compile("backward", given, scoring, deterministic, given.dlse is None)
        yield

    def _compile(self, which: str, given: Any, scoring: Scoring, *how: bool) -> None:
        q, k, v = given.q, given.k, given.v
        dims = q.shape[-1], v.shape[-1], q.shape[-2] // k.shape[-2]
        self.kinds.add((which, *dims, q.dtype, scoring.softcap > 0, *how))
