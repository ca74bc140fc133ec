"""Megatron's core attention beside dense attention; see ``ranks.Pool``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from dense import dense_gradients
from rank_groups import device
from torch import Tensor

from customized_ops.ring_attention import AttnMask, Layout
from customized_ops.ring_attention.api.frameworks.megatron import RingCoreAttention

SINK = (0.25, -1.0, 0.0, 2.0)


def init_method(zeros: Tensor) -> Tensor:
    """Megatron's, that fills a tensor."""
    return zeros.copy_(torch.tensor(SINK))


def config(**given: Any) -> SimpleNamespace:
    """What of a TransformerConfig is looked at."""
    plain = dict(attention_dropout=0.0, context_parallel_size=1, num_attention_heads=8)
    plain |= dict(tensor_model_parallel_size=2, params_dtype=torch.float64, init_method=init_method)
    return SimpleNamespace(**{**plain, **given})


def far(
    mask: AttnMask,
    dims: tuple[int, int],
    sink: tuple[float, ...] | None,
    of_config: dict[str, Any],
    arguments: dict[str, Any],
    call: dict[str, Any],
) -> dict[str, float]:
    """How far out, the inputs' gradients and the sink's are from those of dense attention."""
    size, rank, where = dist.get_world_size(), dist.get_rank(), torch.device(device())
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, mask.q_len, heads, dim, dtype=torch.float64, generator=generator)
        for heads, dim in ((4, dims[0]), (2, dims[0]), (2, dims[1]), (4, dims[1]))
    )
    layout, group = Layout.zigzag(mask.q_len, size), SimpleNamespace(cp=dist.group.WORLD)
    given = {"attn_mask_type": "causal", "attention_type": "self", **arguments}
    layer = RingCoreAttention(
        config(context_parallel_size=size, **of_config), 2, pg_collection=group, **given
    ).to(where)
    own = [layout.shard(t, rank).transpose(0, 1).to(where) for t in (q, k, v, dout)]
    leaves = [t.requires_grad_() for t in own[:3]]
    out = layer(*leaves, None, **call)
    assert out.shape == (own[0].shape[0], 2, 4 * dims[1])
    out.backward(own[3].flatten(2))
    scale = arguments.get("softmax_scale") or dims[0] ** -0.5
    logits = None if sink is None else torch.tensor(sink, dtype=torch.float64)
    want = dense_gradients(q, k, v, mask, scale, dout, sink=logits)
    rows = dict(zip(("out", "dq", "dk", "dv"), (want[0], *want[2:5]), strict=True))
    out = out.detach().unflatten(2, (4, dims[1]))
    found = dict(zip(rows, (out, *(t.grad for t in leaves)), strict=True))
    apart = {
        name: (found[name].cpu().transpose(0, 1) - layout.shard(whole, rank)).abs().max().item()
        for name, whole in rows.items()
    }
    if isinstance(layer.softmax_offset, torch.nn.Parameter):
        gradient = layer.softmax_offset.grad
        dist.all_reduce(gradient)  # as Megatron does with those of all parameters
        apart["dsink"] = (gradient.cpu() - want[5]).abs().max().item()
    return apart


def far_packed(mask: AttnMask, bounds: tuple[int, ...], call: dict[str, Any]) -> dict[str, float]:
    """The same of packed sequences, [t, h, d]."""
    size, where = dist.get_world_size(), torch.device(device())
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, mask.q_len, heads, 8, dtype=torch.float64, generator=generator)
        for heads in (4, 2, 2, 4)
    )
    own_tokens = torch.cat([chunk for n in range(len(bounds) - 1) for chunk in chunks(bounds, n)])
    layer = core_attention(size).to(where)
    own = [t[0, own_tokens].to(where) for t in (q, k, v, dout)]
    leaves = [t.requires_grad_() for t in own[:3]]
    out = layer(*leaves, None, **call)
    assert out.shape == (mask.q_len // size, 4 * 8)
    out.backward(own[3].flatten(1))
    want = dense_gradients(q, k, v, mask, 8**-0.5, dout)
    found = (out.detach().unflatten(1, (4, 8)), *(t.grad for t in leaves))
    pairs = zip(("out", "dq", "dk", "dv"), found, (want[0], *want[2:5]), strict=True)
    return {n: (a.cpu() - whole[0, own_tokens]).abs().max().item() for n, a, whole in pairs}


def chunks(bounds: tuple[int, ...], n: int) -> tuple[Tensor, Tensor]:
    """This rank's two of the 2 P chunks that TransformerEngine cuts sequence n into."""
    size, rank = dist.get_world_size(), dist.get_rank()
    each = torch.arange(bounds[n], bounds[n + 1]).chunk(2 * size)
    return each[rank], each[2 * size - 1 - rank]


def core_attention(size: int) -> RingCoreAttention:
    """A causal one over all ranks."""
    group = SimpleNamespace(cp=dist.group.WORLD)
    return RingCoreAttention(
        config(context_parallel_size=size), 2, "causal", "self", pg_collection=group
    )


def refused(packed_seq_params: Any) -> str:
    """What is said of them."""
    q = torch.zeros(4, 4, 8, device=device())
    try:
        core_attention(dist.get_world_size())(q, q, q, None, packed_seq_params=packed_seq_params)
    except ValueError as error:
        return str(error)
    return ""
