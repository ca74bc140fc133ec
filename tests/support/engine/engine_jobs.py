"""Jobs for the engine tests; see ``ranks.Pool``."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any
from unittest import mock

import dtensor_jobs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_groups import device
from shared.llama import Llama, LlamaConfig
from torch import Tensor, nn

from annotations import ComputeConfig, parallelize
from annotations.engines.torch.plan.rank_agreement import compare
from annotations.waiting import PATIENCE
from customized_ops.ring_attention import (
    AttnMask,
    wrap_masked_attn_func,
    wrap_maybe_shuffle,
    wrap_maybe_unshuffle,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_roll_func,
    wrap_shard_func,
    wrap_shuffle_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_unshard_func,
)
from customized_ops.ring_attention.core.comm import comm_groups as groups


def tiny_llama(op: str, layers: int = 1) -> Llama:
    torch.manual_seed(0)
    config = LlamaConfig(dim=32, layers=layers, heads=4, kv_heads=2, hidden=48, vocab=64, op=op)
    return Llama(config).double()


def sample(op: str, batch: int, length: int, seed: int = 1) -> dict[str, Tensor]:
    """Inputs of which only the first quarter's targets count: those of the first shard."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (batch, length), generator=g)
    targets = torch.randint(64, (batch, length), generator=g)
    targets[:, length // 4 :] = -100
    positions = torch.arange(length).repeat(batch, 1)
    given = {"tokens": tokens, "targets": targets, "position_ids": positions}
    if op == "varlen":
        cuts = [0, length // 5, length // 5, length // 2 + 3, length, length]
        given["cu_seqlens"] = torch.tensor(cuts, dtype=torch.int32)
    return given


def loss_and_gradients(
    op: str, policy: Any, plan: int, batch: int, length: int, layers: int, lowered: bool = True
) -> tuple[float, dict[str, Tensor], str]:
    """One step of a copy on its own batch: loss, gradients after sync, the plan's text."""
    copies = dist.get_world_size() // plan
    model = tiny_llama(op, layers).to(device())

    def inputs(seed: int) -> dict[str, Tensor]:
        return {name: t.to(device()) for name, t in sample(op, batch, length, seed).items()}

    config = ComputeConfig(plan, dist.get_world_size())
    parallel = parallelize(model, inputs(1), policy, config, lowered=lowered)
    loss = parallel(**inputs(1 + dist.get_rank() // plan))
    (loss / copies).backward()
    parallel.sync_grad()
    parallel.sync_grad()  # nothing has run since: must not add again
    model.load_state_dict(parallel.state_dict())
    parallel.load_state_dict(model.state_dict())
    grads = {name: p.grad.cpu() for name, p in parallel.named_parameters()}
    return loss.item(), grads, str(parallel.plan)


def heads_then_sequence(ops: Any, config: ComputeConfig) -> dict[str, str]:
    """A policy: the first attention on heads (Ulysses), the others on the sequence."""
    attention = [op for op in ops if op.communicates]
    assert attention[0].module == "blocks.0.attention"
    return {op.name: "l" if n else "g" for n, op in enumerate(attention)}


def counted_and_planned_bytes() -> tuple[int, int, int, int, str]:
    """Received bytes as counted by the op's comm and as the plan says, forward, then backward; and
    the plan's text."""
    ranks, given = dist.get_world_size(), sample("ring", 1, 33)
    config = ComputeConfig(ranks, ranks)
    parallel = parallelize(tiny_llama("ring"), given, "cp", config, lowered=False)
    for _, comm in groups._by_name.values():
        comm.counters.received_bytes = 0
    loss = parallel(**given)

    def received() -> int:
        return sum(comm.counters.received_bytes for _, comm in groups._by_name.values())

    forward = received()
    loss.backward()
    row = next(row for row, _ in parallel.plan.rows if row.op == "wrap_ring_attn_func")
    backward, plan = received() - forward, str(parallel.plan)
    return forward, backward, row.forward_bytes, row.backward_bytes, plan


class Losses(nn.Module):
    """Attention, then cross entropy in one of the forms that models use."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.project = form, nn.Linear(8, 12).double()

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        y = wrap_ring_attn_func(x, x, x).flatten(2)
        logits = self.project(y)
        match self.form:
            case "classes second":
                return F.cross_entropy(logits.transpose(1, 2), targets)
            case "sum":
                return F.cross_entropy(logits.view(-1, 12), targets.view(-1), reduction="sum")
            case "smoothed":
                return F.cross_entropy(
                    logits.view(-1, 12), targets.view(-1), label_smoothing=0.1, ignore_index=3
                )
            case "weighted":
                weight = torch.arange(1.0, 13.0, dtype=torch.float64)
                return F.cross_entropy(logits.view(-1, 12), targets.view(-1), weight=weight)
            case "ignore 5":
                return F.cross_entropy(logits.view(-1, 12), targets.view(-1), ignore_index=5)
        raise AssertionError(self.form)


def loss_inputs() -> dict[str, Tensor]:
    # As many tokens as classes, so that taking the one dim for the other would not be noticed.
    torch.manual_seed(1)
    x = torch.randn(2, 12, 2, 4, dtype=torch.float64)
    return {"x": x, "targets": torch.randint(12, (2, 12))}


def loss_form(form: str) -> tuple[float, Tensor, Tensor]:
    given = loss_inputs()
    parallel = parallelize(Losses(form), given, "cp", ComputeConfig(2, 2), lowered=False)
    given["x"].requires_grad_()
    loss = parallel(**given)
    loss.backward()
    parallel.sync_grad()
    return loss.item(), parallel.project.weight.grad, given["x"].grad


class Plain(nn.Module):
    """No attention; or something that cannot be cut."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "dropout":
            x = F.dropout(x, 0.1, self.training)
        if self.what == "noise":
            x = x + torch.randn_like(x)
        if self.what == "buffer":
            self.seen.add_(1)
        y = self.linear(x).view(*x.shape[:2], 2, 4)
        if self.what == "value" and y.sum().item() > 1:
            y = 2 * y
        return y.sum() if self.what == "no attention" else wrap_ring_attn_func(y, y, y).sum()


def late(seconds: float, patience: str) -> list[str]:
    """What rank 0 is told where the other rank comes so many seconds late to what ranks compare."""
    with mock.patch.dict(os.environ, **{PATIENCE: patience}):
        if dist.get_rank():
            time.sleep(seconds)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            compare("batches", {"x": "the same"})
        return [str(each.message) for each in told]


def refused(what: str) -> str:
    """The error of parallelizing something that cannot be, as this rank gets it."""
    policy: Any = "cp"
    module: nn.Module = Plain(what)
    given = {"x": torch.zeros(2, 8, 8)}
    config = ComputeConfig(2, 2)
    options: dict[str, Any] = {}
    match what:
        case "unknown policy":
            policy = "diagonal"
        case "wrong split":
            policy = lambda ops, config: {ops[0].name: "hd"}  # noqa: E731
        case "unknown op":
            policy = lambda ops, config: {"attn": "l"}  # noqa: E731
        case "too few to split":
            policy = lambda ops, config: {ops[0].name: "b"}  # noqa: E731
            given = {"x": torch.zeros(1, 8, 8)}
        case "batch of one":
            policy, given = "dp", {"x": torch.zeros(1, 8, 8)}
        case "packed dp":
            policy, module, given = "dp", tiny_llama("varlen"), sample("varlen", 1, 16)
        case "wrong ranks":
            config = ComputeConfig(3, 3)
        case "wrong arguments":
            given = {"y": torch.zeros(1)}
        case "examples of their own":
            given = {"x": torch.zeros(2, 8 + 2 * dist.get_rank(), 8)}
        case "configs of their own":
            config = ComputeConfig(2 - dist.get_rank(), 2)
        case "policies of their own":
            policy = ["cp", "dp"][dist.get_rank()]
        case "hoists of their own":
            config = ComputeConfig(2, 2, pas_config={"hoist": dist.get_rank() == 1})
        case "modules of their own":
            module, given = nn.Linear(8, 8, bias=dist.get_rank() == 0), {"input": given["x"]}
        case "unknown policy of rank 1":
            policy = ["cp", "diagonal"][dist.get_rank()]
        case "one rank":
            config = ComputeConfig(1, 1)
        case "no data on rank 1":
            with torch.device(["cpu", "meta"][dist.get_rank()]):
                module, given = nn.Linear(8, 8, bias=False), {"input": given["x"]}
        case "dtypes of their own" | "dtypes of their own, made one":
            module = Plain("fine").to([torch.float64, torch.float32][dist.get_rank()])
            if what.endswith("one"):
                options["module_dtype"] = torch.float32
        case "verified by rank 1":
            options["verify"] = dist.get_rank() == 1
    if dist.get_rank() == 1:  # what the other cannot know of
        match what:
            case "field of rank 1":
                config = ComputeConfig(2, 2, use_zero=1)
            case "option of rank 1":
                options["lowered"], options["compile"] = False, True
            case "class of rank 1":
                module = Plain  # type: ignore[assignment]
            case "list of rank 1":
                given = [given["x"]]  # type: ignore[assignment]
            case "name of rank 1":
                given = {"z": given["x"]}
            case "verify of rank 1":
                options["verify"] = {"z": given["x"]}
            case "dtype of rank 1":
                options["module_dtype"] = "bf16"
            case "lazy parameter of rank 1":
                module, given = nn.LazyLinear(8), {"input": given["x"]}
            case "mesh of rank 1":
                config = ComputeConfig(2, 2, pas_config={"mesh_shape": (3,)})
    try:
        parallelize(module, given, policy, config, engine="torch", **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def batches_of_their_own(said: bool) -> str:
    """What ranks of one copy say to batches that differ, where comparing calls was asked for
    (``said``) or nothing was said."""
    parallel = parallelize(Plain("fine"), {"x": torch.zeros(2, 8, 8)}, "cp", ComputeConfig(2, 2))
    try:
        with mock.patch.dict(os.environ):
            if not said:
                del os.environ["SEQSHARD_CHECK"]
            parallel(torch.full((2, 8, 8), float(dist.get_rank())))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def called_wrongly() -> list[str]:
    """What a parallel module says to inputs it was not made for."""
    given = {"x": torch.zeros(2, 8, 8)}
    parallel = parallelize(Plain("fine"), given, "cp", ComputeConfig(2, 2))
    said = []
    for x in (torch.zeros(2, 9), torch.zeros(2, 8, 8).double(), [1, 2], None):
        try:
            parallel(x=x)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def eval_mode_and_dropout() -> tuple[float, float]:
    """Dropout drops in training only; the plan follows the mode."""
    torch.manual_seed(0)
    module = Plain("dropout").eval()
    given = {"x": torch.randn(2, 8, 8)}
    parallel = parallelize(module, given, "cp", ComputeConfig(2, 2))
    result = parallel(**given).item()
    parallel.train()
    assert parallel(**given).item() != parallel(**given).item()
    parallel.eval()
    assert parallel(**given).item() == result
    return result, module(**given).item()


def seeds_may_differ() -> list[Tensor]:
    """Ranks that initialise differently start from rank 0's weights."""
    torch.manual_seed(dist.get_rank())
    module = Plain("fine")
    parallel = parallelize(module, {"x": torch.zeros(2, 8, 8)}, "cp", ComputeConfig(2, 2))
    return [p.detach().clone() for p in parallel.parameters()]


class Branches(nn.Module):
    """Which parameters a copy uses depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.unused = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.9)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return self.drop(self.c((self.b if second else self.a)(x))).sum()


def copies_use_different_parameters() -> dict[str, Tensor | None]:
    """Gradients after sync of two whole copies, each with a branch of its own."""
    module = Branches()
    module.drop.eval()
    given = {"x": torch.ones(2, 4), "second": False}
    parallel = parallelize(module, given, "cp", ComputeConfig(1, 2))
    assert parallel.training
    parallel(torch.ones(2, 4), second=dist.get_rank() == 1).backward()
    assert not parallel.drop.training
    parallel.sync_grad()
    return {name: p.grad for name, p in parallel.named_parameters()}


def policy_with_a_private_error() -> str:
    """A policy raises something that only its own process knows."""

    class Private(Exception):
        pass

    def policy(ops: Any, config: ComputeConfig) -> dict[str, str]:
        raise Private("not today")

    try:
        parallelize(Plain("fine"), {"x": torch.zeros(2, 8, 8)}, policy, ComputeConfig(2, 2))
    except Exception as error:
        return str(error)
    return "no error"


class EveryOp(nn.Module):
    """One of the newer ops with a learnable sink, and in what the ops differ."""

    def __init__(self, op: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op = op
        self.project = nn.Linear(16, 48).double()
        self.sink = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.mask = AttnMask.streaming(24, 5, 2)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:-1], 12, 4).split(4, -2)
        given: dict[str, Any] = {"softcap": 3.0, "sink": self.sink}
        given |= {"deterministic": True, "reduce_dtype": torch.float64}
        match self.op:
            case "masked":
                out = wrap_masked_attn_func(q, k, v, self.mask, **given)
            case "dropout":
                out = wrap_ring_attn_func(q, k, v, dropout_p=0.4, dropout_seed=5, **given)
            case "window":
                out = wrap_sliding_window_attn_func(q, k, v, window_size=(6, 0), **given)
            case "packed window":
                cu = (cu_seqlens, cu_seqlens)
                out = wrap_sliding_window_attn_func(q, k, v, *cu, window_size=(6, 0), **given)
            case "streaming":
                out = wrap_streaming_attn_func(q, k, v, 4, 2, **given)
            case "shuffled":
                # Zigzag in the middle of the model: only attention is told.
                q, k, v = (wrap_maybe_shuffle(t, cu_seqlens) for t in (q, k, v))
                q, k, v = (wrap_maybe_unshuffle(t, cu_seqlens) for t in (q, k, v))
                out = wrap_ring_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, **given)
            case "rolled":
                out = wrap_ring_attn_func(q, k, wrap_roll_func(v, -1), **given)
            case "rolled uneven":
                out = wrap_ring_attn_func(q, wrap_roll_func(k, 3), wrap_roll_func(v, -4), **given)
            case "sharded":
                q, k, v = (wrap_shard_func(t, "zigzag") for t in (q, k, v))
                v = wrap_roll_func(v, 5, "zigzag")
                q, k, v = (wrap_unshard_func(t, "zigzag") for t in (q, k, v))
                out = wrap_ring_attn_func(q, k, v, **given)
            case "named uneven":
                q, k, v = (wrap_shuffle_func(t, "zigzag") for t in (q, k, v))
                out = wrap_ring_attn_func(q, k, v, **given)
        return out.square().sum()


# Tracing takes longer than all else: not every op is run so.
LOWERED = ("masked", "dropout", "packed window", "rolled uneven", "sharded")


def every_op_inputs(op: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    shape = (24, 16) if op in ("packed window", "shuffled") else (2, 24, 16)
    if op in ("rolled uneven", "named uneven"):
        shape = (2, 7, 16)
    cu_seqlens = torch.tensor([0, 8, 24], dtype=torch.int32)
    return {"x": torch.randn(shape, dtype=torch.float64), "cu_seqlens": cu_seqlens}


def every_op(op: str) -> tuple[float, dict[str, Tensor]]:
    """One step of a model with one of the newer ops, cut over all ranks."""
    ranks = dist.get_world_size()
    given = every_op_inputs(op)
    config = ComputeConfig(ranks, ranks)
    parallel = parallelize(EveryOp(op), given, "cp", config, lowered=op in LOWERED)
    assert "l / 2" in str(parallel.plan)
    loss = parallel(**given)
    loss.backward()
    parallel.sync_grad()
    return loss.item(), {n: p.grad for n, p in parallel.named_parameters()}


class PartsOfQ(nn.Module):
    """Six heads of q to two of k, with a learnable sink, and a loss of out and lse."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.what = what
        self.project = nn.Linear(16, 40).double()
        self.sink = nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.slopes: Tensor
        self.register_buffer("slopes", torch.linspace(0.1, 0.6, 6))

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:-1], 10, 4).split([6, 2, 2], -2)
        given: dict[str, Any] = {"return_lse": True, "sink": self.sink, "alibi_slopes": self.slopes}
        match self.what:
            case "heads":
                out, lse = wrap_ring_attn_func(q, k, v, **given)
            case "rows":
                out, lse = wrap_ring_attn_func(q, k, v, q_rows=(0, 1), **given)
            case "packed rows":
                cu = (cu_seqlens, cu_seqlens)
                out, lse = wrap_ring_attn_varlen_func(q, k, v, *cu, q_rows=(0, 1), **given)
            case "rows of a cross attention":
                mask = AttnMask.causal(9, x.shape[1])
                out, lse = wrap_masked_attn_func(q[:, :9] * 1.0, k, v, mask, **given)
        return out.square().sum() + lse.square().sum()


def parts_of_q_inputs(what: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    shape = (22, 16) if what == "packed rows" else (2, 22, 16)
    cu_seqlens = torch.tensor([0, 8, 22], dtype=torch.int32)
    return {"x": torch.randn(shape, dtype=torch.float64), "cu_seqlens": cu_seqlens}


def parts_of_q(what: str, policy: Any) -> tuple[float, dict[str, Tensor], str]:
    """One step over all ranks: loss, gradients after sync, the plan's text."""
    ranks = dist.get_world_size()
    given = parts_of_q_inputs(what)
    config = ComputeConfig(ranks, ranks)
    parallel = parallelize(PartsOfQ(what), given, policy, config, lowered=what == "rows")
    loss = parallel(**given)
    loss.backward()
    parallel.sync_grad()
    return loss.item(), {n: p.grad for n, p in parallel.named_parameters()}, str(parallel.plan)


def heads_of_q(ops: Any, config: ComputeConfig) -> dict[str, str]:
    """A policy: the heads of q, more than those of k where there are more ranks than these."""
    (attention,) = ops
    cut = ("b", "l", "g", "qh") if config.plan_ngpus == 2 else ("l", "qh")
    assert attention.splits == cut
    return {attention.name: "qh"}


def named_layout_of_uneven_shards() -> str:
    """What this rank is told; then both ranks must still be able to talk."""
    try:
        every_op("named uneven")
    except ValueError as error:
        dist.barrier()
        return str(error)
    return "no error"


class Means(nn.Module):
    """An op with a result that its communicating split leaves whole, and a loss of some."""

    def __init__(self, op: str, used: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op, self.used = op, used
        self.project = nn.Linear(4, 3).double()
        self.gain = nn.Parameter(torch.rand(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        op = dtensor_jobs.OPS[self.op]
        results = (op(y),) if self.op == "mean" else op(y, self.gain)
        return sum((results[n] - 0.5 * self.gain).pow(2).sum() for n in self.used)


def means_inputs() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(2, 5, 4, dtype=torch.float64)}


def means(op: str, used: tuple[int, ...]) -> tuple[float, dict[str, Tensor], Tensor]:
    """One step over all ranks, cut on tokens: loss, gradients after sync, and of the input."""
    ranks = dist.get_world_size()
    given = means_inputs()
    config = ComputeConfig(ranks, ranks)
    parallel = parallelize(Means(op, used), given, "cp", config, lowered=used == (0, 1))
    assert f"l / {ranks}" in str(parallel.plan)
    given["x"].requires_grad_()
    loss = parallel(**given)
    loss.backward()
    parallel.sync_grad()
    return loss.item(), {n: p.grad for n, p in parallel.named_parameters()}, given["x"].grad


class ShardedAndRolled(nn.Module):
    """Layout ops alone: each can be cut, and what they do shows in the result."""

    def forward(self, x: Tensor) -> Tensor:
        x = wrap_shard_func(x * 1.0, "zigzag")
        return wrap_unshard_func(wrap_roll_func(x, -3, "zigzag"), "zigzag")


def layout_ops_alone() -> tuple[str, Tensor, Tensor]:
    """The plan, the result and the gradient of the model's input."""
    x = torch.arange(2 * 24 * 3, dtype=torch.float64).view(2, 24, 3)
    parallel = parallelize(ShardedAndRolled(), {"x": x}, "cp", ComputeConfig(2, 2))
    leaf = x.clone().requires_grad_()
    result = parallel(x=leaf)
    (result * torch.cos(x)).sum().backward()
    return str(parallel.plan), result.detach(), leaf.grad
