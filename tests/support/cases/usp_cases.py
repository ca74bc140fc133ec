"""Cases of the modules of yunchang: where its ranks' tokens lie, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from op_cases import SEED, Case
from torch import Tensor

from customized_ops.ring_attention import Layout
from customized_ops.ring_attention.api import yunchang
from customized_ops.ring_attention.api.yunchang.degrees import SequenceParallel, layout_of


def tokens_there(impl: str, total: int, rank: int, ud: int, rd: int, low: bool) -> list[int]:
    """The tokens that yunchang's own function of this name gives to a rank, in order."""
    tokens, ranks = list(range(total)), ud * rd
    if impl == "zigzag":
        r, u = (rank // ud, rank % ud) if low else (rank % rd, rank // rd)
        size = total // (2 * rd)
        chunks = [tokens[n : n + size] for n in range(0, total, size)]
        own = chunks[r] + chunks[2 * rd - 1 - r]
        return own[u * len(own) // ud : (u + 1) * len(own) // ud]
    if impl == "strip":
        tokens = [token for r in range(rd) for token in tokens[r::rd]]
    return tokens[rank * total // ranks : (rank + 1) * total // ranks]


@dataclass(frozen=True)
class UspCase(Case):
    """``op`` is "ring", "varlen" or "masked" and says what is right; the module is what is called.

    Attributes:
        ud, rd: Ulysses and ring degree. impl: ``ring_impl_type``. low: ``use_ulysses_low``.
        module: which of them.
    """

    ud: int = 1
    rd: int = 1
    impl: str = "basic"
    low: bool = True
    module: str = "LongContextAttention"

    def layouts(self, ranks: int) -> tuple[Layout, Layout]:
        """As yunchang cuts its tensors."""
        if ranks == 1:
            return (Layout.contiguous(self.length, 1),) * 2
        assert ranks == self.ud * self.rd
        if self.length % (2 * ranks):
            return (layout_of(self.impl, self.length, self.ud, self.rd, self.low),) * 2
        given = self.impl, self.length
        held = [tokens_there(*given, n, self.ud, self.rd, self.low) for n in range(ranks)]
        return (Layout.from_ranges([[(n, n + 1) for n in own] for own in held]),) * 2

    def made(self, group: Any) -> torch.nn.Module:
        """The module."""
        make = getattr(yunchang, self.module)
        if self.module == "UlyssesAttention":
            assert self.rd == 1 and self.impl == "basic"
            return make([dist.get_rank()] if group is None and dist.is_initialized() else group)
        degrees = (1, 1) if group is None else (self.ud, self.rd)
        given = {"parallel": SequenceParallel(*degrees, group, self.low)}
        if self.module == "LongContextAttentionQKVPacked" and self.heads[0] != self.heads[1]:
            given["kv_heads"] = self.heads[1]
        return make(ring_impl_type=self.impl, **given)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, **where: Any
    ) -> Any:
        """out and lse."""
        assert sink is None
        options: dict[str, Any] = {
            "alibi_slopes": self.per_head()[0],
            "dropout_p": self.dropout,
            "dropout_seed": SEED,
            "softcap": self.softcap,
            "return_lse": True,
        }
        if self.op == "masked":
            options["mask"] = self.given
        else:
            options |= {"causal": self.causal, "window_size": self.window}
        if self.op == "varlen":
            options["cu_seqlens"] = torch.tensor(self.cu_seqlens, device=self.device)
        elif self.length % (2 * self.ud * self.rd):
            options["total"] = self.length
        module = self.made(where["process_group"])
        return module(*self._tensors(q, k, v), **options)

    def _tensors(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if self.module != "LongContextAttentionQKVPacked":
            return q, k, v
        if self.heads[0] == self.heads[1]:
            return (torch.stack([q, k, v], -3),)
        return (torch.cat([q, k, v], -2),)


def as_there(case: UspCase) -> list[list[Tensor]]:
    """A program as yunchang's users write it, in two models of other degrees; out, dq, dk, dv each.

    Every ``case.ud * case.rd`` ranks of the world have a copy of the case.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    degrees = [(case.ud, case.rd), (case.rd, case.ud)]
    models = []
    for ud, rd in degrees:
        yunchang.set_seq_parallel_pg(ud, rd, rank, world, use_ulysses_low=case.low)
        models.append(getattr(yunchang, case.module)(ring_impl_type=case.impl))
    results = []
    for (ud, rd), model in zip(degrees, models, strict=True):
        yunchang.set_seq_parallel_pg(ud, rd, rank, world, use_ulysses_low=case.low)
        extract = yunchang.EXTRACT_FUNC_DICT[case.impl]
        q, k, v, dout = (extract(t, rank, ud * rd, rd=rd, ud=ud) for t in case.tensors())
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out = model(*leaves, causal=case.causal, window_size=case.window, return_attn_probs=True)
        out.backward(dout)
        results.append([t.detach().cpu() for t in (out, *(leaf.grad for leaf in leaves))])
    return results


def compiled(case: UspCase) -> Tensor:
    """A compiled model's out, over the whole world."""
    rank, world = dist.get_rank(), dist.get_world_size()
    yunchang.set_seq_parallel_pg(case.ud, case.rd, rank, world)
    model = torch.compile(case.made(tuple(range(world))), fullgraph=True, backend="aot_eager")
    extract = yunchang.EXTRACT_FUNC_DICT[case.impl]
    q, k, v, _ = (extract(t, rank, world, rd=case.rd, ud=case.ud) for t in case.tensors())
    return model(q, k, v, causal=case.causal).cpu()
