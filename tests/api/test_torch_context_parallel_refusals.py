"""What PyTorch's context parallelism, by its names, refuses."""

from __future__ import annotations

import cp_jobs
import pytest
import torch
import torch.nn.functional as F
from cp_jobs import Block
from ranks import Pool, worlds
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

from customized_ops.ring_attention import GroupError, Layout, run_ranks
from customized_ops.ring_attention.api import torch_context_parallel as cp
from customized_ops.ring_attention.api.torch_context_parallel.interception import ORIGINAL
from customized_ops.ring_attention.op.arguments import ArgumentError


def test_an_error_closes_the_block_and_restores() -> None:
    x = torch.randn(2, 8, 4)
    before, storage = x.clone(), x.data_ptr()
    with (
        pytest.raises(KeyError),
        cp.context_parallel(None, buffers=[x], buffer_seq_dims=[1]),
    ):
        x.zero_()
        raise KeyError
    assert torch.equal(x, before)
    assert x.data_ptr() == storage
    assert F.scaled_dot_product_attention is ORIGINAL
    model = Block()
    style = cp.ContextParallel()
    style._apply(model.attention, None)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 8, 5, dtype=torch.float64))
    with pytest.raises(ArgumentError):
        model.attention(x, x, x[:1])
    assert F.scaled_dot_product_attention is ORIGINAL


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"buffers": [torch.zeros(4)]}, "1 buffers, but 0 dims"),
        ({"buffers": [torch.zeros(4)], "buffer_seq_dims": [1]}, r"dim 1 of buffers\[0\]"),
        (
            {"buffers": [torch.zeros(4), torch.zeros(5)], "buffer_seq_dims": [0, 0]},
            r"different lengths, \[4, 5\]",
        ),
        ({"buffers": [nn.Parameter(torch.zeros(4))], "buffer_seq_dims": [0]}, "a gradient"),
        ({"no_restore_buffers": [torch.zeros(4)]}, "no_restore_buffers must be among buffers"),
        ({"layout": "stripes"}, "layout must be"),
        ({}, "without buffers"),
        ({"layout": Layout.zigzag(8, 2)}, "is for 8 tokens over 2 ranks"),
    ],
)
def test_blocks_that_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentError, match=said), cp.context_parallel(None, **given):
        pass


def test_calls_that_are_refused() -> None:
    q = torch.randn(1, 4, 8, 4)
    ones = torch.ones(8, 8)
    few = q[:, :2]
    with cp.context_parallel(None, layout=Layout.contiguous(8, 1)):
        for args, options, error, said in (
            ((q, q, q), {"attn_mask": ones}, NotImplementedError, "adds numbers to scores"),
            ((q, q, q), {"attn_mask": ones[1:]}, ArgumentError, r"\(8, 8\) with leading dims of 1"),
            (
                (q, q, q),
                {"attn_mask": ones > 0, "is_causal": True},
                ArgumentError,
                "attn_mask with is_causal=True",
            ),
            ((q, few, few), {}, ArgumentError, "enable_gqa=True"),
            ((q[0, 0], q[0, 0], q[0, 0]), {}, ArgumentError, r"must be \[b, h, l, d\]"),
            ((q, q[:, :, :3], q[:, :, :3]), {}, ValueError, "k"),
        ):
            with pytest.raises(error, match=said):
                F.scaled_dot_product_attention(*args, **options)
        for given, said in (
            ({"score_mod": lambda *_: 0}, "score_mod is not taken"),
            ({"kernel_options": {"BLOCK_M": 1}}, "kernel_options are for torch's own"),
            ({"return_aux": AuxRequest(max_scores=True)}, "no kernel here tells the largest"),
        ):
            with pytest.raises(NotImplementedError, match=said):
                cp.flex_attention(q, q, q, **given)
        short = create_block_mask(lambda b, h, i, j: i >= j, None, None, 7, 7, device="cpu")
        with pytest.raises(ArgumentError, match="of 7 x 7 tokens, but the whole sequence has 8"):
            cp.flex_attention(q, q, q, block_mask=short)
    with pytest.raises(ArgumentError, match=r"seq_dims are of \[0\], but buffers of \['x'\]"):
        cp.context_parallel_shard(None, {"x": q}, [2])
    with pytest.raises(NotImplementedError, match="seq_dim=1"):
        cp.ContextParallel(1)
    with pytest.raises(ArgumentError, match="layout must be a Layout or None"):
        cp.ContextParallel(layout="zigzag")
    with pytest.raises(NotImplementedError, match="say layout="):
        cp.context_parallel_unshard(None, [q], [2], load_balancer=object())


@worlds(cpus=[4], gpus=[4])
def test_a_mesh_of_two_axes_is_refused(ranks: Pool) -> None:
    said = ranks.run(cp_jobs.whole_mesh)
    assert all("the mesh has 2 axes, outer, inner" in text for text in said)
    assert GroupError.__name__ in said[0]


def test_a_backward_outside_that_reads_a_buffer_is_refused() -> None:
    """The buffer is whole again there; with one token a rank, shapes alone would not tell."""

    def rank(comm) -> None:
        table = torch.arange(2.0).view(1, 2, 1, 1)
        q = torch.ones(1, 1, 1, 4, requires_grad=True)
        with cp.context_parallel(comm, buffers=[table], buffer_seq_dims=[1]):
            out = (q * table.transpose(1, 2)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()

    run_ranks(2, rank)


@pytest.mark.parametrize("kind", [cp.ContextParallel.AttentionType.FLEX, cp.AttentionType.SDPA])
def test_attention_types(kind: cp.AttentionType) -> None:
    cp.ContextParallel(attention_type=kind)
    with pytest.raises(ValueError, match="attention_type='sdpa' is none of"):
        cp.ContextParallel(attention_type="sdpa")  # type: ignore[arg-type]
