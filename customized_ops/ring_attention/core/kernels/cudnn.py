"""The kernel "cudnn": cuDNN's fused attention as torch calls it, on GPUs.

torch's op knows two shapes, all pairs and a causal square, and one sequence a batch entry. So a
causal slice of more keys than rows takes two calls and each document takes its own; the rows of
several calls are merged in fp32. Fine for one long sequence, slow for many short ones.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..merge import accumulation_dtype, merge_, unattended
from .lowering import lower
from .lse_apart import lse_apart
from .pairs import Pairs
from .protocol import Capabilities
from .scoring import Scoring, Tokens
from .torch_sdpa import Tile

NAME = "cudnn"
CAPABILITIES = (
    Capabilities(
        device="cuda",
        dtypes=(torch.bfloat16, torch.float16),
        features=("lse gradient",),
        widths=((128, 128),),
        multiple=8,
        arch=(8, 0),
    ),
)

# cuDNN 9.10.2: 9.10.0 and 9.10.1 compute wrongly. As torch counts.
CUDNN = 91002


def missing() -> str | None:
    """See :class:`~.protocol.Kernel`."""
    if not hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention"):
        return f"torch {torch.__version__} has no cuDNN attention"
    if not torch.backends.cudnn.is_available():
        return "torch was built without cuDNN, or finds none"
    found = torch.backends.cudnn.version()
    return f"cuDNN {found} is too old; {CUDNN} or newer is needed" if found < CUDNN else None


def tiles(pairs: Pairs) -> list[Tile]:
    """The calls: all pairs of some rows and keys, or a causal square."""
    cut = []
    for call in lower(pairs.slices, gaps=False):
        left, right = call.window
        assert left < 0, "a window, which this kernel does not have"
        for q0, q1, k0, k1 in call.segments.tolist():
            # The bound meets the last key at row ``turn``; from there on rows attend all keys.
            turn = q0 if right < 0 else max(q0, q1 - right)
            corner = k1 - (turn - q0)
            cut += [
                Tile(q0, turn, k0, corner),
                Tile(q0, turn, corner, k1, causal=True),
                Tile(turn, q1, k0, k1),
            ]
    return [tile for tile in cut if tile.q0 < tile.q1 and tile.k0 < tile.k1]


def forward(
    q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, scoring: Scoring, tokens: Tokens | None
) -> tuple[Tensor, Tensor]:
    """See :class:`~.protocol.Kernel`."""
    cut = pairs.made(tiles, lambda: tiles(pairs))
    out, lse = unattended(q, v.shape[-1], accumulation_dtype(q.dtype))
    for tile in cut:
        part, part_lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            **_operands(tile, q, k, v),
            attn_bias=None,
            compute_log_sumexp=True,
            dropout_p=0.0,
            is_causal=tile.causal,
            return_debug_mask=False,
            scale=scoring.softmax_scale,
        )
        part, part_lse = part.transpose(1, 2), part_lse.view(part.shape[:3])
        if len(cut) == 1 and tile.q1 - tile.q0 == q.shape[1]:
            return part, part_lse
        rows = slice(tile.q0, tile.q1)
        merge_(out[:, rows], lse[..., rows], part, part_lse)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pairs: Pairs,
    scoring: Scoring,
    tokens: Tokens | None,
    *,
    dlse: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`~.protocol.Kernel`. The gradient of lse is calls of its own."""
    wide = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (q, k, v))
    _add_gradients((dq, dk, dv), dout, q, k, v, out, lse, pairs, scoring)
    if dlse is not None:
        dout, out, v = lse_apart(dlse, out, v)
        _add_gradients((dq, dk), dout, q, k, v, out, lse, pairs, scoring)
    return dq, dk, dv


def _add_gradients(
    totals: tuple[Tensor, ...],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pairs: Pairs,
    scoring: Scoring,
) -> None:
    """Add dq, dk and, where ``totals`` has a third, dv of all tiles."""
    no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
    more_dims = _lse_dims(q.device) - lse.ndim
    for tile in pairs.made(tiles, lambda: tiles(pairs)):
        rows, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad_out=dout[:, rows].transpose(1, 2),
            **_operands(tile, q, k, v),
            out=out[:, rows].transpose(1, 2),
            logsumexp=lse[..., rows].contiguous()[(...,) + (None,) * more_dims],
            philox_seed=no_dropout,
            philox_offset=no_dropout,
            attn_bias=None,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=tile.q1 - tile.q0,
            max_k=tile.k1 - tile.k0,
            dropout_p=0.0,
            is_causal=tile.causal,
            scale=scoring.softmax_scale,
        )
        for total, grad, where in zip(totals, grads, (rows, keys, keys), strict=False):
            total[:, where] += grad.transpose(1, 2)


@lru_cache(maxsize=8)
def _lse_dims(device: torch.device) -> int:
    """How many dims the op's lse has on this torch: [b, h, i] or [b, h, i, 1]."""
    q = torch.zeros((1, 1, 64, 64), dtype=torch.bfloat16, device=device)
    _, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query=q, key=q, value=q, attn_bias=None, compute_log_sumexp=True
    )
    return lse.ndim


def _operands(tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The tile's q, k, v as [b, heads, tokens, d]."""
    rows, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
    return {
        "query": q[:, rows].transpose(1, 2),
        "key": k[:, keys].transpose(1, 2),
        "value": v[:, keys].transpose(1, 2),
    }
