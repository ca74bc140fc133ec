"""Jobs for the tests of training; see ``ranks.Pool``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from unittest import mock

import torch
import torch.distributed as dist
from engine_jobs import Branches, Losses, loss_inputs, sample, tiny_llama
from rank_groups import device
from steps import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from annotations import ComputeConfig, ParallelModule, parallelize
from annotations.engines.torch.module import gradient_sync as gradients
from annotations.engines.torch.module import training as norms

SMALL_BUCKET_MB = 0.01  # several buckets even of a tiny model


def batch(seed: int, length: int = 16) -> dict[str, Tensor]:
    given = sample("ring", 1, length, seed)
    return {name: t.to(device()) for name, t in given.items()}


def accumulated(overlap: bool, plan: int, micro_batches: int) -> tuple[dict[str, Tensor], int]:
    """Gradients of a step of several micro-batches, and how many buckets the backward started."""
    ranks = dist.get_world_size()
    copies, copy = ranks // plan, dist.get_rank() // plan
    config = ComputeConfig(
        plan, ranks, use_async_reducer=overlap, reducer_bucket_cap_mb=SMALL_BUCKET_MB
    )
    model = parallelize(tiny_llama("ring").to(device()), batch(1), "cp", config)
    started = 0
    with mock.patch.object(gradients.Bucket, "start", autospec=True) as start:
        start.side_effect = start_bucket
        for n in range(micro_batches - 1):
            with model.no_sync():
                (model(**batch(1 + copy + copies * n)) / copies).backward()
            assert start.call_count == 0
        (model(**batch(1 + copy + copies * (micro_batches - 1))) / copies).backward()
        started = start.call_count
        model.sync_grad()
    assert start.call_count > 3
    return {name: p.grad.cpu() for name, p in model.named_parameters()}, started


start_bucket = gradients.Bucket.start


def overlapped_and_different() -> tuple[dict[str, Tensor | None], str]:
    """Two copies that use different parameters, with gradients moving in the backward; and what a
    second backward is told."""
    module = Branches()
    module.drop.eval()
    given = {"x": torch.ones(2, 4), "second": False}
    config = ComputeConfig(1, 2, use_async_reducer=True, reducer_bucket_cap_mb=1e-5)
    model = parallelize(module, given, "cp", config)
    said = "nothing"
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 4), second=dist.get_rank() == 1).backward()
        model.sync_grad()
    grads = {
        name: p.grad.clone() if p.grad is not None else None for name, p in model.named_parameters()
    }
    try:
        for _ in range(2):
            model(torch.ones(2, 4), second=False).backward()
    except RuntimeError as error:
        said = str(error)
    model.sync_grad()
    return grads, said


def whole_grads() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((5, 3), (7,), (4, 6), (2, 2), (1, 3))
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


def norm_of_parts(norm_type: float, max_norm: float) -> tuple[float, list[Tensor]]:
    """The norm over whole gradients and those cut over the plan, evenly or not; then clipped."""
    mesh = init_device_mesh(device(), (2, 2), mesh_dim_names=("copy", "plan"))["plan"]
    cut = (None, [Shard(0)], [Shard(1)], [Replicate()], [Shard(0)])  # of the last one rank has none
    grads = [
        g.to(device()) if place is None else distribute_tensor(g.to(device()), mesh, place)
        for g, place in zip(whole_grads(), cut, strict=True)
    ]
    norm = norms.total_norm(grads, norm_type)
    for grad in grads:
        parameter = nn.Parameter(torch.zeros_like(grad))
        parameter.grad = grad
        nn.utils.clip_grads_with_norm_(parameter, max_norm, norm)
    return norm.item(), [whole(grad) for grad in grads]


def cut_parameters() -> list[Tensor]:
    """Gradients of a parameter that is whole and of one that the plan cuts, added up by buckets."""
    mesh = init_device_mesh(device(), (2, 2), mesh_dim_names=("copy", "plan"))
    copy = mesh.get_local_rank("copy")
    whole = nn.Parameter(torch.zeros(3, device=device()))
    zeros = torch.zeros(5, 2, device=device())
    cut = nn.Parameter(distribute_tensor(zeros, mesh["plan"], [Shard(0)]))
    whole.grad = torch.full((3,), float(dist.get_rank()), device=device())
    cut.grad = distribute_tensor(
        torch.arange(10.0, device=device()).view(5, 2) * (1 + copy), mesh["plan"], [Shard(0)]
    )
    reducer = gradients.Reducer(1e6, mesh["copy"].get_group(), overlap=False)
    reducer.watch([whole, cut])
    reducer.sync()
    return [whole.grad.cpu(), cut.grad.full_tensor().cpu()]


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.llama = tiny_llama("ring")

    def forward(self, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss = self.llama(**data)
        return loss, 2 * loss


def end_to_end(overlap: bool, lowered: bool) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """nnscaler's steps: three micro-batches, the last of which is a dummy."""
    config = ComputeConfig(2, 2, use_end2end=True, use_async_reducer=overlap)
    module = TwoResults().to(device())
    model = parallelize(module, {"data": batch(1)}, "cp", config, lowered=lowered)
    given = [batch(seed) for seed in (1, 2, 3)]
    for _ in range(2):  # gradients of the first step are cleared
        results = model.train_step(given, [False, False, True], lambda loss: loss / 2)
    model.sync_grad()  # nothing has run since: must not add again
    said = [twice.item() for _, twice in results]
    assert not results[0][0].requires_grad
    inferred = [loss.item() for loss, _ in model.infer_step(given)]
    alone = TwoResults().to(device())
    alone.load_state_dict(model.state_dict())
    model.load_state_dict(alone.state_dict())
    return said, inferred, {n: p.grad.cpu() for n, p in model.named_parameters()}


def gradients_that_are_old(plan: int, overlap: bool) -> dict[str, list[Tensor]]:
    """Gradients of this rank where a forward had no backward, or one that came late."""
    ranks = dist.get_world_size()
    config = ComputeConfig(plan, ranks, use_async_reducer=overlap)
    policy = "cp" if plan == 1 else {"*.gate.weight": 0}
    model = parallelize(tiny_llama("ring").to(device()), batch(1), policy, config)
    found = {}

    def note(what: str) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found[what] = [whole(grad).clone() for grad in grads]

    model(**batch(1)).backward()
    model.sync_grad()
    model(**batch(2))
    norm, _ = model.clip_gnorm(0.1)
    note("clipped")
    model(**batch(2))
    again, _ = model.clip_gnorm()
    assert norm > 0.2 and abs(again - 0.1) < 1e-6
    model.zero_grad()
    first, second = model(**batch(1)), model(**batch(2))
    first.backward()
    model.sync_grad()
    note("first")
    model.zero_grad()
    second.backward()
    model.sync_grad()
    note("second")
    model.zero_grad(set_to_none=False)
    loss = model(**batch(1))
    if dist.get_rank() < plan:  # the other copy has no data
        loss.backward()
    model.sync_grad()
    note("of one copy")
    for p in model.parameters():  # by hand
        p.grad = torch.ones_like(p)
    model(**batch(1))
    model.sync_grad()
    note("by hand")
    return found


def guarded(mistakes: Sequence[str]) -> dict[str, list[str]]:
    """What is said of trainings of one module that go wrong otherwise, one after the other. Before
    them, it is trained beside the original."""
    ranks = dist.get_world_size()
    model, given = Losses("sum"), loss_inputs()
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = parallelize(model, given, "cp", ComputeConfig(ranks, ranks))
    _beside_the_original(model, parallel, given)
    after = torch.optim.SGD(parallel.parameters(), lr=0.1)
    said = {}
    for what in mistakes:
        parallel.zero_grad()
        optimizer = before if what == "made before" else after
        said[what] = _trained(parallel, given, optimizer, what)
    return said


def _trained(
    parallel: ParallelModule, given: dict[str, Tensor], optimizer: torch.optim.SGD, what: str
) -> list[str]:
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            parallel(**given).backward()
            if what != "not synced":
                parallel.sync_grad()
            if what == "cleared in place":
                parallel.zero_grad(set_to_none=False)
        try:
            optimizer.step()
        except RuntimeError as error:
            said.append(str(error))
    return said + [str(warning.message) for warning in caught]


def _beside_the_original(
    model: nn.Module, parallel: ParallelModule, given: dict[str, Tensor]
) -> None:
    """Both may be trained; a step where nothing is due is no error, nor is one after sync_grad."""
    for module in (model, parallel):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.step()
        module(**given).backward()
        if module is parallel:
            parallel.sync_grad()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
