"""PyTorch's context parallelism, by its names, against its attention on one device."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import cp_jobs
import pytest
import torch
import torch.nn.functional as F
from cp_jobs import NAMES, Block, Sdpa, batch, step
from dense import assert_same, dense_attention
from ranks import Pool, worlds
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as bound_before

from customized_ops.ring_attention import AttnMask, Layout, run_ranks
from customized_ops.ring_attention.api import torch_context_parallel as cp
from customized_ops.ring_attention.api.torch_context_parallel import interception
from customized_ops.ring_attention.api.torch_context_parallel.interception import ORIGINAL

CASES = {
    "causal": Sdpa(causal=True),
    "full": Sdpa(),
    "grouped, scaled": Sdpa(causal=True, heads=(4, 2), scale=0.3),
    "in order": Sdpa(causal=True, layout="contiguous"),
    "no batch": Sdpa(causal=True, batch=None),
    "mask": Sdpa(mask="bool"),
    "mask of numbers": Sdpa(mask="float", layout="contiguous"),
    "block mask": Sdpa(mask="documents", heads=(4, 2)),
    "short": Sdpa(total=3, causal=True),
}

BOTH = (cp_jobs.on_one_device, cp_jobs.in_world)


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_same(name, a, b)


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name: str, ranks: int) -> None:
    want = cp_jobs.alone(CASES[name])
    for got in run_ranks(ranks, lambda comm: cp_jobs.in_block(CASES[name], comm)):
        same(got, want)
    assert F.scaled_dot_product_attention is ORIGINAL


@worlds(cpus=[2], gpus=[2])
def test_processes(ranks: Pool) -> None:
    for name in ("grouped, scaled", "mask of numbers", "block mask"):
        want = cp_jobs.alone(CASES[name])
        for got in ranks.run(cp_jobs.in_world, CASES[name]):
            same(got, want)


@worlds(cpus=[2], gpus=[2])
def test_dropout_is_rank_zeros(ranks: Pool) -> None:
    """However the ranks are seeded, and the same as one device that is seeded as the first."""
    case = replace(CASES["causal"], dropout_p=0.4)
    torch.manual_seed(7)
    want = cp_jobs.in_block(case, None)
    assert (want[0] - cp_jobs.alone(CASES["causal"])[0]).abs().max() > 0.1
    for got in ranks.run(cp_jobs.in_world, case):
        same(got, want)


@worlds(gpus=[2])
def test_bf16(ranks: Pool) -> None:
    """No further from fp64 than twice one GPU is, and rounding."""
    for name in ("causal", "grouped, scaled", "block mask"):
        case = replace(CASES[name], total=500, dtype=torch.bfloat16, width=64)
        answers = (cp_jobs.alone(case), *(ranks.run(job, case)[0] for job in BOTH))
        for what, truth, one, many in zip(NAMES, *answers, strict=True):
            error_one, error_many = ((t.double() - truth).abs().max() for t in (one, many))
            rounding = torch.finfo(torch.bfloat16).eps * truth.abs().max()
            assert error_many <= 2 * error_one + rounding, (name, what, error_one, error_many)


def expected(rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    model = Block()
    loss = sum(model(batch(row)).square().sum() for row in range(rows))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("again", ["", "reentrant", "not reentrant"])
def test_backward_in_the_block(again: str) -> None:
    """What a checkpoint computes again is over the ranks, too."""
    loss, grads = expected(1)
    models = [Block(again) for _ in range(3)]  # ranks that are threads share a generator
    got = run_ranks(3, lambda comm: step(models[comm.rank], comm))
    assert_same("loss", sum(one for one, _ in got), loss, 1e-9)
    for n, (name, want) in enumerate(grads.items()):
        assert_same(name, sum(own[n] for _, own in got), want, 1e-9)


@pytest.mark.parametrize("again", [False, True])
@worlds(cpus=[4], gpus=[4])
def test_a_style_on_a_mesh(ranks: Pool, again: bool) -> None:
    loss, grads = expected(2)
    for got, own in ranks.run(cp_jobs.styled, (2, 2), again):
        assert_same("loss", got, loss, 1e-9)
        for name, want in grads.items():
            assert_same(name, own[name], want, 1e-9)


def test_names_bound_before_and_multihead_attention() -> None:
    x = torch.randn(2, 22, 8, dtype=torch.float64)
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double().eval()
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    want = layer(x).detach(), bound_before(heads, heads, heads)

    def rank(comm) -> list[Tensor]:
        mine = x.clone()
        with cp.context_parallel(comm, buffers=[mine], buffer_seq_dims=[1]):
            own = mine.unflatten(-1, (2, 4)).transpose(1, 2)
            got = [layer(mine).detach(), bound_before(own, own, own)]
            with pytest.raises(NotImplementedError, match="need_weights=False"):
                layer.self_attn(mine, mine, mine)
        return cp.context_parallel_unshard(comm, got, [1, 2])

    for got in run_ranks(2, rank):
        assert_same("layer", got[0], want[0])
        assert_same("bound before", got[1], want[1])


def test_flex_attention_gives_lse_alone_and_over_ranks() -> None:
    case = CASES["block mask"]
    q, k, v, _ = case.tensors()
    by_head = [t.transpose(1, 2) for t in (q, k, v)]
    _, want = dense_attention(*by_head, AttnMask.from_dense(case.allowed().numpy()), 8**-0.5)
    mask = create_block_mask(
        lambda b, h, i, j: case.allowed()[i, j], None, None, 29, 29, device="cpu"
    )
    given = {"block_mask": mask, "enable_gqa": True}
    assert_same("alone", cp.flex_attention(q, k, v, **given, return_lse=True)[1], want)

    def rank(comm) -> Tensor:
        own = cp.context_parallel_shard(comm, [q, k, v, mask], [2, 2, 2, 0])
        assert own.pop() is mask
        with cp.context_parallel(comm, layout=Layout.zigzag(29, 2)):
            _, aux = cp.flex_attention(*own, **given, return_aux=AuxRequest(lse=True))
        return cp.context_parallel_unshard(comm, [aux.lse], [2])[0]

    for got in run_ranks(2, rank):
        assert_same("over ranks", got, want)


def test_torchs_own_flex_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # in less time
    q = torch.randn(1, 2, 8, 4)
    with (
        cp.context_parallel(None, layout=Layout.contiguous(8, 1)),
        pytest.raises(NotImplementedError, match="torch's flex_attention attends to this rank's"),
    ):
        flex_attention(q, q, q)


def test_threads_of_autograd_are_in_the_block_that_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards of GPUs run on threads of their own; another thread is in no block."""
    with (
        ThreadPoolExecutor(1) as other,
        cp.context_parallel(None, layout=Layout.contiguous(8, 1)),
    ):
        here = interception.current()
        assert here is not None
        assert other.submit(interception.current).result() is None
        monkeypatch.setattr(interception, "_in_backward", lambda: True)
        assert other.submit(interception.current).result() is here
        with ThreadPoolExecutor(1) as third:
            third.submit(interception.enter, here).result()
            with pytest.raises(RuntimeError, match="several threads have a block open"):
                other.submit(interception.current).result()
            third.submit(interception.leave).result()


def test_nothing_is_copied() -> None:
    q = torch.randn(1, 2, 8, 4)
    with cp.context_parallel(None, layout=Layout.contiguous(8, 1)):
        out = F.scaled_dot_product_attention(q, q, q)
    assert out.transpose(1, 2).is_contiguous()  # as the op made it
