"""Cases of the gated delta rule and of gated linear attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....linear_attention import wrap_gated_delta_rule_func, wrap_gated_linear_attn_func
from . import along_sequence, sequences
from .along_sequence import AlongSequenceCase
from .distributed_case import WHOLE, Place


@dataclass(frozen=True)
class LinearAttentionCase(AlongSequenceCase):
    """A call of either function.

    Attributes:
        delta: the delta rule, otherwise gates alone. channels: a decay for each channel.
        heads: of q and k, and of v. dims: dk and dv.
        initial: whether initial states are given. final: whether final states are returned.
        decay: how fast states decay; 0 is never. wide_gates: g and beta in fp32, q in less.
        scale: what q is multiplied by; None is the default.
    """

    delta: bool = False
    channels: bool = False
    heads: tuple[int, int] = (1, 1)
    dims: tuple[int, int] = (1, 1)
    initial: bool = False
    final: bool = False
    decay: float = 1.0
    wide_gates: bool = False
    scale: float | None = None

    SIMPLER: ClassVar[tuple[str, ...]] = (
        *("strided", "wide_gates", "scale", "initial", "final", "batch", "layout", "dtype"),
        *("channels", "delta", "heads", "dims", "decay", "seed"),
    )
    RESULTS: ClassVar[tuple[str, ...]] = ("out", "final")
    PARAMETERS: ClassVar[tuple[str, ...]] = ("initial_state",)

    @property
    def result_names(self) -> tuple[str, ...]:
        """out, and the final states if they are asked for."""
        return self.RESULTS if self.final else self.RESULTS[:1]

    @property
    def _states(self) -> tuple[int, ...]:
        count = len(self.cu_seqlens) - 1 if self.cu_seqlens else self.batch
        return count, self.heads[1], *self.dims

    def arguments(self) -> dict[str, Tensor]:
        """The tensors by the functions' argument names; keys have length 1."""
        normal, (h, hv), (dk, dv) = self.normal(), self.heads, self.dims
        gates = (hv, dk) if self.channels else (hv,)
        k = torch.nn.functional.normalize(normal(*self.tokens, h, dk), dim=-1)
        given = {"q": normal(*self.tokens, h, dk), "k": k, "v": normal(*self.tokens, hv, dv)}
        given["g"] = -normal(*self.tokens, *gates).abs() * self.decay
        if self.delta:
            given["beta"] = normal(*self.tokens, hv).sigmoid()
        if self.initial:
            given["initial_state"] = normal(*self._states)
        if self.wide_gates and self.dtype != torch.float64:
            given |= {n: given[n].float() for n in ("g", "beta") if n in given}
        return given

    def upstream(self) -> dict[str, Tensor]:
        normal = self.normal(1)
        out = {"out": normal(*self.tokens, self.heads[1], self.dims[1])}
        if not self.final:
            return out
        states = normal(*self._states)
        return out | {"final": states if self.dtype == torch.float64 else states.float()}

    def places(self, ranks: int) -> dict[str, Place]:
        """Everything is cut by tokens, except states."""
        tokens = self.by_tokens(ranks)
        named = dict.fromkeys(("q", "k", "v", "g", "beta", "out"), tokens)
        return {**named, "initial_state": WHOLE, "final": WHOLE}

    def call_on_rank(
        self, given: Mapping[str, Tensor], rank: int, ranks: int, group: Any
    ) -> tuple[Tensor, ...]:
        function = wrap_gated_delta_rule_func if self.delta else wrap_gated_linear_attn_func
        options = {"scale": self.scale, "output_final_state": self.final}
        found = function(**{**given, **options, **self.where(ranks, group)})
        return found if isinstance(found, tuple) else (found,)

    def specification(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The recurrence, token by token."""
        (h, hv), dk = self.heads, self.dims[0]
        q, k = (given[n].repeat_interleave(hv // h, 2) for n in "qk")
        v, g, beta = given["v"], given["g"], given.get("beta")
        g = g.exp() if self.channels else g.exp().unsqueeze(-1)
        scale = dk**-0.5 if self.scale is None else self.scale
        shape = len(self.ends) - 1, self.batch, hv, *self.dims
        states = given.get("initial_state", v.new_zeros(1)).expand(self._states).view(shape)
        outs, finals = [], []
        for (start, stop), state in zip(pairwise(self.ends), states, strict=True):
            for t in range(start, stop):
                state = g[:, t].unsqueeze(-1) * state
                written = v[:, t]
                if beta is not None:
                    held = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
                    written = beta[:, t].unsqueeze(-1) * (written - held)
                state = state + k[:, t].unsqueeze(-1) * written.unsqueeze(-2)
                outs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
            finals.append(state)
        final = torch.stack(finals).view(self._states)
        return (torch.stack(outs, 1), final) if self.final else (torch.stack(outs, 1),)


def drawn(random: Random, ranks: int) -> LinearAttentionCase:
    heads = random.choice([1, 1, 2, 3])
    return LinearAttentionCase(
        **along_sequence.drawn(random, ranks),
        delta=random.random() < 0.5,
        channels=random.random() < 0.5,
        heads=(heads, heads * random.choice([1, 1, 2, 3])),
        dims=(random.randint(1, 6), random.randint(1, 6)),
        initial=random.random() < 0.4,
        final=random.random() < 0.4,
        decay=random.choice([0.0, 0.1, 1.0, 1.0, 30.0]),
        wide_gates=sequences.rarely(random),
        scale=random.choice([None, None, None, 0.7]),
    )
