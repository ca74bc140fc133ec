"""Jobs that call one module with inputs of changing shapes; see ``ranks.Pool``."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from unittest import mock

import engine_jobs
import torch
import torch.distributed as dist
from packed_jobs import counted, forget_batches
from steps import over_all, step
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule

from annotations import ComputeConfig, parallelize, register_op
from annotations.engines.torch.run import execute
from customized_ops.ring_attention import (
    packed_batches,
    wrap_maybe_shuffle,
    wrap_maybe_unshuffle,
    wrap_ring_attn_varlen_func,
)


class Packed(nn.Module):
    """Attention over packed documents between two matrices. ``counts``: how the loss depends on the
    number of documents."""

    def __init__(self, shuffles: bool = False, counts: str = "", window: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shuffles, self.counts = shuffles, counts
        self.pattern: dict[str, Any] = {}
        if window is not None:
            self.pattern = {"causal": True, "window_size": (window, 0 if window >= 0 else -1)}
        self.into, self.out = nn.Linear(6, 24).double(), nn.Linear(8, 6).double()

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        h = wrap_maybe_shuffle(x, cu_seqlens) if self.shuffles else x
        q, k, v = self.into(h).unflatten(-1, (3, 2, 4)).unbind(1)
        ends = cu_seqlens.to(torch.int32)
        y = wrap_ring_attn_varlen_func(q, k, v, ends, cu_seqlens, **self.pattern)
        y = self.out(y.flatten(1))
        y = wrap_maybe_unshuffle(y, cu_seqlens) if self.shuffles else y
        loss = (y * x).square().sum()
        count = cu_seqlens.shape[0]
        if self.counts == "in a tensor":
            return loss * torch.tensor(float(count))
        if self.counts == "under autocast":
            with torch.autocast(x.device.type):
                return loss * count
        return loss * count if self.counts else loss


class TwoLengths(Packed):
    """Lengths of keys come beside those of queries, and are only compared with them in number."""

    def forward(self, x: Tensor, cu_seqlens: Tensor, cu_keys: Tensor) -> Tensor:
        if cu_keys.shape != cu_seqlens.shape:
            raise ValueError("give as many lengths of keys")
        return super().forward(x, cu_seqlens)


def batch(lengths: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Documents of these lengths."""
    total = sum(lengths)
    x = torch.randn(total, 6, generator=torch.Generator().manual_seed(seed)).double()
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {"x": x, "cu_seqlens": ends}


def steps(
    batches: Sequence[Sequence[int]],
    policy: Any,
    plan: int = 2,
    how: Any = None,
    lowered: bool = False,
    settings: Any = None,
) -> tuple[list[tuple[float, Tensor]], list[str]]:
    """Losses and a gradient of each batch, and the plans of the graphs that were made. A copy's
    batches are one further than those of the copy before."""
    copy = dist.get_rank() // plan
    model = Packed(**(how or {}))
    config = ComputeConfig(plan, dist.get_world_size(), pas_config=settings or {})
    parallel = parallelize(model, batch(batches[0]), policy, config, lowered=lowered)
    results = []
    for n in range(len(batches)):
        parallel.zero_grad()
        loss = parallel(**batch(batches[(n + copy) % len(batches)]))
        loss.backward()
        parallel.sync_grad()
        results.append((loss.item(), parallel.into.weight.grad.clone()))
    return results, list(map(str, parallel._programs.plans.values()))


def drawn(seed: int, total: int) -> list[int]:
    """Lengths of so many tokens: some of no token, of one, one that is longer than all others."""
    draw = random.Random(seed)
    cuts = sorted(draw.choices(range(total + 1), k=draw.choice([0, 1, 2, 5, 7])))
    ends = [0, *cuts, total]
    return [stop - start for start, stop in pairwise(ends)]


def random_steps(seeds: Sequence[int], total: int, window: int | None) -> float:
    """The largest error of a loss or gradient over batches of drawn documents, by one graph."""
    alone, config = Packed(window=window), over_all(pas_config={"hoist": True})
    example = batch([1] * 8 + [total - 8])
    parallel = parallelize(Packed(window=window), example, "cp", config)
    largest = 0.0
    for seed in seeds:
        given, results = batch(drawn(seed, total), seed), []
        for module in (alone, parallel):
            module.zero_grad()
            loss = module(**given)
            loss.backward()
            results.append([loss.detach(), module.into.weight])
        parallel.sync_grad()
        for one, cut in zip(*([x, w.grad] for x, w in results), strict=True):
            scale = max(1.0, one.abs().max().item())
            largest = max(largest, (one - cut).abs().max().item() / scale)
    assert len(parallel._programs.plans) == 1
    return largest


def lengths_elsewhere(seeds: Sequence[int], total: int) -> tuple[float, int]:
    """:func:`random_steps` where lengths count as on another device than the ranks compute on, and
    how often a tensor was asked about."""
    asked = mock.Mock(side_effect=lambda tensor, mesh: tensor.dtype == torch.int32)
    with mock.patch.object(execute, "elsewhere", asked):
        return random_steps(seeds, total, -1), asked.call_count


class Scaled(nn.Module):
    """Rows times integers, by ``op``."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self._op = nn.Linear(8, 8).double(), op

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return self._op(self.into(x), n).square().sum()


def integers_elsewhere() -> float:
    """The error of a loss where integers count as on another device, and are cut."""

    @register_op("l d+, l -> l d+")
    def scale_rows(x: Tensor, n: Tensor) -> Tensor:
        return x * n[:, None]

    given = {"x": torch.arange(128.0).double().view(16, 8), "n": torch.arange(16).int()}
    with mock.patch.object(execute, "elsewhere", lambda tensor, mesh: tensor.dtype == torch.int32):
        model = Scaled(scale_rows)
        parallel = parallelize(model, given, {"scale_rows": "l"}, over_all())
        loss, wanted = parallel(**given), model(**given)
        return abs(loss.item() - wanted.item()) / wanted.item()


def as_it_is(graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """A graph that stands for what inductor would make of it."""
    return make_boxed_func(graph.forward)


def compilations(
    batches: Sequence[Sequence[int]], hoist: bool, inductor: bool
) -> tuple[list[int], float]:
    """How many graphs had been compiled, by ``inductor`` or not at all, after the step of each
    batch; and the largest error of a loss."""
    from torch._inductor import compile_fx  # which takes seconds

    alone, config = Packed(window=-1), over_all(pas_config={"hoist": hoist})
    first = batch(batches[0])
    parallel = parallelize(Packed(window=-1), first, "cp", config, compile=True)
    counts, errors = [], []
    by_dynamo = counters["stats"]["unique_graphs"]
    compiler = mock.Mock(wraps=compile_fx.compile_fx_inner if inductor else as_it_is)
    with mock.patch.object(compile_fx, "compile_fx_inner", compiler):
        for seed, lengths in enumerate(batches):
            given = batch(lengths, seed)
            loss = parallel(**given)
            loss.backward()
            parallel.sync_grad()
            parallel.zero_grad()
            errors.append(abs(loss.item() - alone(**given).item()))
            counts.append(compiler.call_count + counters["stats"]["unique_graphs"] - by_dynamo)
    return counts, max(errors)


def planned_ahead(
    batches: Sequence[Sequence[int]], settings: Any, layout: str = "", sent: bool = False
) -> tuple[list[tuple[float, Tensor]], dict[str, int], list[str]]:
    """Losses and a gradient of batches that a loader planned, "sent" by a worker; how often what it
    made was made again in a step; and what was said of that.

    Args:
        layout: "" for the one that the module's plan names.
    """
    size, rank, config = dist.get_world_size(), dist.get_rank(), over_all(pas_config=settings)
    # Tracing takes longer than all else.
    example = batch(batches[0])
    parallel = parallelize(Packed(window=-1), example, "cp", config, lowered=not (sent or layout))
    layout = layout or parallel.plan.packed_layout
    documents = [[[0] * n for n in lengths] for lengths in batches]
    attends = {"heads": (2, 2), "head_dim": 4, "whole": True, "layout": layout}
    forget_batches()
    made = list(packed_batches(documents, **attends, ranks=size, rank=rank))
    if sent:
        bytes_of = pickle.dumps(made)
        del made
        forget_batches()
        made = pickle.loads(bytes_of)
    results = []
    with counted() as counts, warnings.catch_warnings(record=True) as caught:
        for lengths, ahead in zip(batches, made, strict=True):
            parallel.zero_grad()
            loss = parallel(batch(lengths)["x"], ahead.cu_seqlens)
            loss.backward()
            parallel.sync_grad()
            results.append((loss.item(), parallel.into.weight.grad.clone()))
    said = [str(w.message) for w in caught if "plans again in the step" in str(w.message)]
    return results, counts, said


def llama_batches(shapes: Sequence[tuple[int, int]], policy: str) -> tuple[list[Any], list[int]]:
    """A Llama over [batch, length] of changing sizes, and how many graphs there were after each."""
    model = engine_jobs.tiny_llama("ring")
    first = engine_jobs.sample("ring", *shapes[0])
    parallel = parallelize(model, first, policy, over_all())
    results, graphs = [], []
    for shape in shapes:
        parallel.zero_grad()
        loss, _ = step(parallel, engine_jobs.sample("ring", *shape))
        results.append((loss, next(parallel.parameters()).grad.clone()))
        graphs.append(len(parallel._programs.plans))
    return results, graphs
