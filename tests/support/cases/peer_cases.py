"""Cases of the functions of ring_flash_attn: which tokens a rank holds, and how it calls one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from op_cases import Case
from torch import Tensor

from customized_ops.ring_attention import Layout
from customized_ops.ring_attention.api import ring_flash_attn as api
from customized_ops.ring_attention.core.comm.comm_groups import comm_by_name, group_name


@dataclass(frozen=True)
class PeerCase(Case):
    """``op`` is "ring" or "varlen" and says what is right; ``function`` is what is called.

    Attributes:
        function: its name, without what it packs. packs: "", "kv" or "qkv".
        stride: ``heads_k_stride`` of llama3's.
    """

    function: str = "ring_flash_attn"
    packs: str = ""
    stride: int = 1

    def layouts(self, ranks: int) -> tuple[Layout, Layout]:
        """As that package's tests cut their tensors."""
        layout = Layout.from_ranges([runs(self._tokens(r, ranks)) for r in range(ranks)])
        return layout, layout

    def _tokens(self, rank: int, ranks: int) -> list[int]:
        tokens = torch.arange(self.length)
        if "stripe" in self.function:
            return tokens[rank::ranks].tolist()
        if "llama3" in self.function:
            return tokens.chunk(ranks)[rank].tolist()
        cu = self.cu_seqlens or (0, self.length)
        held: list[int] = []
        for start, stop in pairwise(cu):
            parts = 2 * ranks if "zigzag" in self.function else ranks
            own = [rank, parts - 1 - rank] if "zigzag" in self.function else [rank]
            size = (stop - start) // parts
            for n in own:
                held += range(start + n * size, start + (n + 1) * size)
        return held

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, **where: Any
    ) -> Any:
        """out and lse; alone where no group is named."""
        group = where["process_group"]
        if group is None:
            group = [dist.get_rank() if dist.is_initialized() else 0]
        tensors = {"": (q, k, v)}
        tensors["kv"] = (q, torch.stack([k, v], -3))
        if q.shape == k.shape == v.shape:
            tensors["qkv"] = (torch.stack([q, k, v], -3),)
        packed = f"{self.packs}packed_" if self.packs else ""
        function = getattr(api, f"{self.function}_{packed}func")
        out, lse, probabilities = function(
            *tensors[self.packs],
            *self._documents(group),
            dropout_p=self.dropout,
            causal=self.causal,
            window_size=self.window,
            alibi_slopes=self.per_head()[0],
            return_attn_probs=True,
            group=group,
        )
        assert probabilities is None
        return out, lse

    def _documents(self, group: Any) -> tuple[Any, ...]:
        if not self.packed:
            return ()
        comm = comm_by_name(group_name(group))
        cu = torch.tensor(self.cu_seqlens, dtype=torch.int32, device=self.device)
        if "llama3" in self.function:
            told = api.llama3_flash_attn_prepare_cu_seqlens(cu, self.causal, comm.rank, comm.size)
            return (*told[:4], self.stride, told[4])
        return cu // comm.size, int(cu.diff().max()) // comm.size


def runs(tokens: list[int]) -> list[tuple[int, int]]:
    """Ranges of one token each."""
    return [(n, n + 1) for n in tokens]


BATCH = dict(length=32, heads=(4, 2), batch=2)
EVEN = dict(length=96, cu_seqlens=(0, 16, 16, 64, 96), heads=(4, 2))
ANY = dict(length=48, cu_seqlens=(0, 5, 5, 30, 48), heads=(4, 2))
FAMILIES = {
    "ring_flash_attn": ("ring", BATCH),
    "zigzag_ring_flash_attn": ("ring", BATCH),
    "stripe_flash_attn": ("ring", BATCH),
    "ring_flash_attn_varlen": ("varlen", EVEN),
    "zigzag_ring_flash_attn_varlen": ("varlen", EVEN),
    "llama3_flash_attn_varlen": ("varlen", ANY),
}


def table() -> dict[str, PeerCase]:
    """Every function, as it is called most, and each of its kinds with other arguments."""
    cases = {}
    for function, (op, given) in FAMILIES.items():
        for packs in ("", "kv", "qkv"):
            heads = (4, 4) if packs == "qkv" else given["heads"]
            made = PeerCase(op, **{**given, "heads": heads}, function=function, packs=packs)
            cases[f"{function} {packs}".strip()] = made
        for name, others in OTHERS.items():
            cases[f"{function}, {name}"] = PeerCase(op, **given, **others, function=function)
    return cases


OTHERS = {
    "full": dict(causal=False, stride=2),
    "window": dict(window=(9, -1)),
    "two-sided window and alibi": dict(causal=False, window=(7, 3), alibi=True),
}
TABLE = table()
