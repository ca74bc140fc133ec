"""Jobs for the tests of lowered plans; see ``ranks.Pool``. They compare on the rank itself."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import engine_jobs
import torch
from dense import assert_same
from rank_groups import device
from steps import over_all, refusal
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from annotations import parallelize
from annotations.engines.torch.module import gradient_sync as gradients
from annotations.engines.torch.run.local_graph import communicates
from customized_ops.ring_attention import wrap_ring_attn_func


class Several(nn.Module):
    """Tied weights, a constant, results of several kinds: one no tensor, one an input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 16).double()
        self.out = nn.Linear(16, 11, bias=False).double()
        self.out.weight = self.table.weight
        self.gain = nn.Parameter(torch.rand(16, dtype=torch.float64))
        self.register_buffer("shift", torch.linspace(0, 1, 16, dtype=torch.float64))

    def forward(self, tokens: Tensor, x: Tensor) -> dict[str, Any]:
        signs = torch.tensor([1.0, -1.0] * 8, dtype=torch.float64, device=x.device)
        y = (self.table(tokens) + x) * self.gain * signs + self.shift
        if self.training:
            y = y * 2
        heads = y.unflatten(-1, (4, 4))
        y = wrap_ring_attn_func(heads, heads[:, :, :2], heads[:, :, 2:]).flatten(2)
        logits = self.out(y)
        return {
            "loss": logits.logsumexp(-1).sum(),
            "y": y,
            "best": logits.argmax(-1),
            "given": x,
            "one": 1,
        }


def several_inputs() -> dict[str, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 9, 16, dtype=torch.float64, device=device())
    return {"tokens": torch.randint(11, (2, 9), device=device()), "x": x}


def every_kind_of_call() -> int:
    """The plan and the module itself, called in several ways; returns how often was traced."""
    given = several_inputs()
    whole = Several().to(device())
    parallel = parallelize(Several().to(device()), given, "cp", over_all())

    def same(what: str, use: tuple[str, ...], **changed: Tensor) -> None:
        sides = []
        for module in (whole, parallel):
            module.zero_grad()
            inputs = {n: t.detach().requires_grad_(t.requires_grad) for n, t in changed.items()}
            results = module(**{**given, **inputs})
            if use:
                loss = sum(results[name].sum() for name in use)
                loss.backward()
            sides.append((module, results, inputs))
        parallel.sync_grad()
        (_, expected, inputs), (_, results, mine) = sides
        assert results.keys() == expected.keys() and results["one"] == 1
        assert torch.equal(results["best"], expected["best"])
        for name in ("loss", "y", "given"):
            assert_same(f"{what}: {name}", results[name], expected[name], 1e-12)
            assert results[name].requires_grad == expected[name].requires_grad, (what, name)
        own = dict(parallel.named_parameters())
        grads = [(n, p.grad, own[n].grad) for n, p in whole.named_parameters()]
        grads += [(n, inputs[n].grad, mine[n].grad) for n in inputs]
        for name, want, got in grads:
            assert (want is None) == (got is None), (what, name)
            if want is not None:
                assert_same(f"{what}: gradient of {name}", got, want, 1e-12)

    same("training", ("loss",))
    same("both results", ("loss", "y"))
    x = given["x"].clone().requires_grad_()
    same("x wants a gradient", ("y",), x=x)
    same("other strides", ("loss",), x=given["x"].transpose(0, 1).contiguous().transpose(0, 1))
    for module in (whole, parallel):
        module.gain.requires_grad_(False)
    same("a frozen parameter", ("loss",))
    with torch.no_grad():
        same("no gradients", ())
    with torch.inference_mode():
        same("inference", ())
    whole.eval(), parallel.eval()
    same("eval", ("loss",))
    return sum(len(lowered.traces) for lowered in parallel._programs.plans)


def saved_and_sent(policy: Any, layers: int, length: int, compiled: bool) -> dict[str, Any]:
    """Bytes saved for the backward and collectives started, on DTensors and lowered; loss and
    gradients are compared. Also what may communicate, in order, forward and backward."""
    model, given = engine_jobs.tiny_llama("ring", layers), engine_jobs.sample("ring", 1, length)
    model, given = model.to(device()), {name: t.to(device()) for name, t in given.items()}
    parallel = parallelize(model, given, policy, over_all(), compile=compiled)
    lowered = parallel._program()
    flat = lowered.captured.inputs.flatten((), given)
    found: dict[str, Any] = {}
    sides = []
    for name, run in (("on DTensors", lowered.program), ("lowered", lowered)):
        if name == "lowered":
            run(parallel._attribute, flat)  # traces
        saved: dict[int, int] = {}
        known = {p.untyped_storage().data_ptr() for p in parallel.parameters()}

        def pack(t: Tensor, saved: dict[int, int] = saved, known: set[int] = known) -> Tensor:
            local = t._local_tensor if hasattr(t, "_local_tensor") else t
            memory = local.untyped_storage()
            if memory.data_ptr() not in known:
                saved[memory.data_ptr()] = memory.nbytes()
            return t

        parallel.zero_grad()
        with CommDebugMode() as counted:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                (loss,) = run(parallel._attribute, flat)
            loss.backward()
        found[name] = sum(saved.values()), counted.get_total_counts()
        sides.append([loss, *(p.grad for p in parallel.parameters())])
    for n, (want, got) in enumerate(zip(*sides, strict=True)):
        assert_same(f"{n}", got, want, 1e-12)
    [trace] = lowered.traces
    found["order"] = [
        [f"{node.target} {node.args[-1]}" for node in graph.nodes if communicates(node)]
        for graph in trace.graphs
    ]
    return found


def backward_twice() -> None:
    """The second adds the same gradients again."""
    given = several_inputs()
    parallel = parallelize(Several().to(device()), given, "cp", over_all())
    loss = parallel(**given)["loss"]
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in parallel.named_parameters()}
    loss.backward()
    for name, p in parallel.named_parameters():
        assert_same(name, p.grad, 2 * once[name])


def early_gradients() -> tuple[list[bool], str]:
    """Whether each bucket's gradients were in ``.grad`` when it started, in the order of starts;
    and what is said where a parameter is used outside of the module too."""
    given, config = several_inputs(), over_all(use_async_reducer=True, reducer_bucket_cap_mb=1e-5)
    parallel = parallelize(Several().to(device()), given, "cp", config)
    there: list[bool] = []
    start = gradients.Bucket.start

    def started(bucket: gradients.Bucket) -> None:
        there.append(all(p.grad is not None for p in bucket.parameters))
        start(bucket)

    with patch.object(gradients.Bucket, "start", started):
        parallel(**given)["loss"].backward()
    parallel.sync_grad()
    whole = Several().to(device())
    whole(**given)["loss"].backward()
    for name, p in parallel.named_parameters():
        assert_same(name, p.grad, whole.get_parameter(name).grad)
    return there, refusal((parallel(**given)["loss"] + parallel.gain.sum()).backward)


def gradients_that_autograd_changes() -> str:
    """What travels is what comes to be in ``.grad``, also where that is not what one graph found;
    and what is said of gradients that never come there."""
    given, config = several_inputs(), over_all(use_async_reducer=True, reducer_bucket_cap_mb=1e-5)
    parallel = parallelize(Several().to(device()), given, "cp", config)
    whole = Several().to(device())
    other = given | {"x": given["x"].flip(1)}
    for module in (parallel, whole):
        (module(**given)["loss"] + module(**other)["loss"]).backward()
    parallel.sync_grad()
    for name, p in parallel.named_parameters():
        assert_same(f"two forwards, {name}", p.grad, whole.get_parameter(name).grad)
    parallel.gain.register_hook(lambda grad: 3 * grad)
    for module in (parallel, whole):
        module.zero_grad()
        module(**given)["loss"].backward()
    parallel.sync_grad()
    assert_same("gain", parallel.gain.grad, 3 * whole.gain.grad)
    assert_same("table", parallel.table.weight.grad, whole.table.weight.grad)
    parallel.zero_grad()
    torch.autograd.grad(parallel(**given)["loss"], list(parallel.parameters()))
    return refusal(parallel.sync_grad)
