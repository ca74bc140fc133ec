"""Jobs that count how often batches of other totals are traced; see ``ranks.Pool``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from shape_jobs import Packed, batch, drawn
from steps import over_all
from torch import Tensor, nn

from annotations import parallelize
from annotations.engines.torch.run import lowered
from customized_ops.ring_attention import wrap_ring_attn_varlen_func


class Residual(Packed):
    """Rows of a table, by the sign of the first feature, and what attention adds to them: for each
    token, or a number."""

    def __init__(self, tokens: bool = False, **how: Any) -> None:
        super().__init__(**how)
        self.table, self.tokens = nn.Embedding(2, 6).double(), tokens

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = self.table((x[:, 0] > 0).long())
        q, k, v = self.into(x).unflatten(-1, (3, 2, 4)).unbind(1)
        y = wrap_ring_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, **self.pattern)
        x = x + self.out(y.flatten(1))
        return x if self.tokens else x.square().sum()


def traced(
    totals: Sequence[int], how: Any = None, settings: Any = None
) -> list[tuple[float, int, str]]:
    """Of a batch of each total the largest error of its loss and gradients, how often anything was
    exported or lowered for it, and the plan."""
    alone, config = Residual(**(how or {})), over_all(pas_config=settings or {})
    example = batch([1] * 8 + [totals[0] - 8])
    parallel = parallelize(Residual(**(how or {})), example, "cp", config)
    found = []
    for seed, total in enumerate(totals):
        given, results = batch(drawn(seed, total), seed), []
        made = [mock.Mock(wraps=f) for f in (torch.export.export, lowered.aot_module_simplified)]
        with (
            mock.patch.object(torch.export, "export", made[0]),
            mock.patch.object(lowered, "aot_module_simplified", made[1]),
        ):
            for module in (alone, parallel):
                module.zero_grad()
                loss = module(**given).square().sum()
                loss.backward()
                results.append([loss.detach(), *module.parameters()])
        parallel.sync_grad()
        pairs = [(x if x.grad is None else x.grad, y if y.grad is None else y.grad)
                 for x, y in zip(*results, strict=True)]  # fmt: skip
        error = max(((x - y).abs().max() / x.abs().max().clamp(min=1)).item() for x, y in pairs)
        found.append((error, sum(each.call_count for each in made), str(parallel.plan)))
    return found


class Length(nn.Module):
    """A loss that depends on the number of tokens: on it itself, by a branch, or by a buffer."""

    def __init__(self, on: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.on, self.packed = on, Packed()
        self.register_buffer("places", torch.arange(64, dtype=torch.float64)[:, None])

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        total = x.shape[0]
        if self.on == "number":
            x = x * (1 + 1 / total)
        elif self.on == "branch":
            x = x * (3 if total > 30 else 2)
        elif self.on == "buffer":
            x = x + self.places[:total]
        elif self.on == "one size":
            x = x * (3 if total == 24 else 2)
        elif self.on == "this size":
            x = x * (3 if total == 21 else 2)
        return self.packed(x, cu_seqlens)
