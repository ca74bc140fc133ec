"""ring_flash_attn's adapter: a model of transformers over ranks against the same on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from dense import assert_same
from ranks import Pool, worlds
from torch import Tensor

from customized_ops.ring_attention import run_ranks
from customized_ops.ring_attention.api.ring_flash_attn import hf as adapter
from customized_ops.ring_attention.api.ring_flash_attn import (
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
)
from tests.kernels.conformance import assert_near

transformers = pytest.importorskip("transformers", minversion="5")
import flash_adapter_jobs  # noqa: E402


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What the adapter changed in this process is changed back."""
    own = transformers.AttentionInterface._global_mapping["flash_attention_2"]
    yield
    transformers.AttentionInterface.register("flash_attention_2", own)
    adapter._settings.group = adapter._settings.documents = None


def check(ranks: list[list[Tensor]], alone: list[Tensor]) -> None:
    names = ["logits", *dict(flash_adapter_jobs.model("eager").named_parameters())]
    got = [torch.cat([r[0] for r in ranks]), *map(sum, zip(*(r[1:] for r in ranks), strict=True))]
    for name, a, b in zip(names, got, alone, strict=True):
        assert b.abs().max() > 1e-3
        assert_same(name, a, b)


@pytest.mark.parametrize(("ranks", "stride"), [(1, 1), (3, 2)])
def test_packed_documents(ranks: int, stride: int) -> None:
    made = flash_adapter_jobs.model("flash_attention_2")
    parts = run_ranks(ranks, lambda comm: flash_adapter_jobs.cut(made, comm, stride))
    check(parts, flash_adapter_jobs.alone())


@worlds(cpus=[2], gpus=[2])
def test_real_ranks(ranks: Pool) -> None:
    parts = ranks.run(flash_adapter_jobs.cut_over, (0, 1), 1)
    check(parts, ranks.run(flash_adapter_jobs.alone)[0])


@worlds(cpus=[2], gpus=[2])
def test_bf16(ranks: Pool) -> None:
    """Over ranks at most twice as far from fp64 as on one, by the kernel that is the fastest."""
    names = ["logits", *dict(flash_adapter_jobs.model("eager").named_parameters())]
    for answers in ranks.run(flash_adapter_jobs.cut_in_bf16, 1):
        for name, truth, alone, got in zip(names, *answers, strict=True):
            assert truth.abs().max() > 1e-3
            assert_near(name, got, truth, alone, torch.bfloat16)


@pytest.mark.slow
@worlds(cpus=[4], gpus=[4])
def test_a_group_that_does_not_begin_at_rank_0(ranks: Pool) -> None:
    first, *own, last = ranks.run(flash_adapter_jobs.cut_over, (1, 2), 1)
    assert first is None and last is None
    check(own, ranks.run(flash_adapter_jobs.alone)[0])


def layer(length: int = 6, keys: int = 6, rows: int = 1, mask: Tensor | None = None, **others):
    """A call as a model's attention layer makes it; heads before tokens."""
    module = torch.nn.Module()
    module.is_causal = True
    q, k = torch.randn(rows, 4, length, 8).double(), torch.randn(rows, 2, keys, 8).double()
    return q, k, adapter.attention(module, q, k, k, mask, **others)[0]


def test_what_a_layer_asks_for() -> None:
    from dense import dense_attention

    from customized_ops.ring_attention import AttnMask

    substitute_hf_flash_attn([0], 1)
    update_ring_flash_attn_params([0, 6], [0])
    sinks = torch.randn(4).double()
    asked = dict(scaling=0.3, softcap=2.0, s_aux=sinks, sliding_window=3, is_causal=False)
    q, k, out = layer(**asked, use_cache=True, output_attentions=False)
    q, k = (t.transpose(1, 2) for t in (q, k))
    mask = AttnMask.dense(6, causal=False, window=(2, 2))
    assert_same("out", out, dense_attention(q, k, k, mask, 0.3, softcap=2.0, sink=sinks)[0])


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (dict(mask=torch.ones(1, 6)), "attention_mask cannot be honoured"),
        (dict(cu_seq_lens_q=torch.tensor([0, 6])), "cu_seq_lens_q cannot be honoured"),
        (dict(output_attentions=True), "output_attentions cannot be honoured"),
        (dict(length=1), "query has 1 tokens and key 6; a KV cache"),
        (dict(rows=2), r"packed in one row, but query is of shape \(2, 4, 6, 8\)"),
    ],
)
def test_what_cannot_be_honoured(asked: dict, says: str) -> None:
    substitute_hf_flash_attn([0], 1)
    update_ring_flash_attn_params([0, 6], [0])
    with pytest.raises(ValueError, match=says):
        layer(**asked)


def test_documents_have_to_be_told_first() -> None:
    substitute_hf_flash_attn([0], 1)
    with pytest.raises(ValueError, match="before the model runs, update_ring_flash_attn_params"):
        layer()
    with pytest.raises(ValueError, match="heads_k_stride must be positive, got 0"):
        substitute_hf_flash_attn([0], 0)
