"""The kernel "cudnn": cuDNN's fused attention as torch calls it, on GPUs.

torch's op supports two shapes, all pairs and a causal square, and one sequence per batch entry. So
a causal slice with more keys than rows takes two calls, and each document takes calls of its own;
rows of several calls are merged. This is fine for one long sequence and slow for many short ones.

torch caches the graphs that it builds for cuDNN by the shapes and strides of q, k and v. Building
one takes some 15 ms of host time (H100), so "auto" gives documents, whose lengths seldom repeat, to
other kernels. A graph is wrong for an out or dout whose strides are not those it was built with, so
these two are made contiguous here. A graph that could not be built, as for the backward of a single
pair, is cached as a null that the next call runs into, so a single pair is passed as two tokens.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...merge.merge import accumulation_dtype
from ..protocol.kernel import BackwardOperands, ForwardOperands, Grads, OutLse, Pairs
from ..protocol.request import HALF, Capabilities
from ..protocol.scoring import Scoring, Tokens
from ..window import tiled
from ..window.columns import apart
from ..window.lowering import lower
from ..window.tiled import Tile, Tiling

NAME = "cudnn"
CAPABILITIES = (Capabilities("cuda", HALF, ("lse gradient",), widest=128, multiple=8, arch=(8, 0)),)

# cuDNN 9.10.2, as torch numbers it: 9.10.0 and 9.10.1 compute wrong results.
OLDEST = 91002


def missing() -> str | None:
    if not hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention"):
        return f"torch {torch.__version__} has no cuDNN attention"
    if not torch.backends.cudnn.is_available():
        return "torch was built without cuDNN, or finds none"
    found = torch.backends.cudnn.version()
    return f"cuDNN {found} is too old; {OLDEST} or newer is needed" if found < OLDEST else None


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
    given: ForwardOperands, pairs: Pairs, scoring: Scoring, tokens: Tokens | None
) -> OutLse:
    def attend(tile: Tile) -> OutLse:
        return _attend(tile, given.part(tile.rows, tile.keys), scoring)

    return tiled.forward(attend, given, _tiling(pairs))


def backward(
    given: BackwardOperands, pairs: Pairs, scoring: Scoring, tokens: Tokens | None, **_: bool
) -> Grads:
    """The gradient of lse takes calls of its own."""
    of_lse, wide = apart(given), accumulation_dtype(given.q.dtype)

    def attend_backward(tile: Tile) -> Grads:
        rows, keys = tile.rows, tile.keys
        dq, dk, dv = _gradients(tile, given.part(rows, keys), scoring)
        if of_lse is not None:
            more_dq, more_dk, _dv = _gradients(tile, of_lse.part(rows, keys), scoring)
            dq, dk = dq.to(wide) + more_dq, dk.to(wide) + more_dk
        return dq, dk, dv

    return tiled.backward(attend_backward, given, _tiling(pairs))


def _tiling(pairs: Pairs) -> Tiling:
    return pairs.made(_tiling, lambda: Tiling.of(tiles(pairs), pairs))


def _attend(tile: Tile, given: ForwardOperands, scoring: Scoring) -> OutLse:
    """out [b, rows, h, e] and lse [b, h, rows] of a tile."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query=_heads_first(tile, given.q),
        key=_heads_first(tile, given.k),
        value=_heads_first(tile, given.v),
        attn_bias=None,
        compute_log_sumexp=True,
        dropout_p=0.0,
        is_causal=tile.causal or _single_pair(tile),
        return_debug_mask=False,
        scale=scoring.softmax_scale,
    )
    length = tile.q1 - tile.q0
    return out[:, :, :length].transpose(1, 2), lse.view(out.shape[:3])[..., :length]


def _gradients(tile: Tile, given: BackwardOperands, scoring: Scoring) -> Grads:
    """dq, dk and dv of a tile."""
    dout, q, k, v, out, lse, _ = given
    query, key, value = (_heads_first(tile, t) for t in (q, k, v))
    lse = (pad(lse, (0, 1)) if _single_pair(tile) else lse).contiguous()
    no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad_out=_heads_first(tile, dout, contiguous=True),
        query=query,
        key=key,
        value=value,
        out=_heads_first(tile, out, contiguous=True),
        logsumexp=lse[(...,) + (None,) * (_lse_dims(q.device) - lse.ndim)],
        philox_seed=no_dropout,
        philox_offset=no_dropout,
        attn_bias=None,
        cum_seq_q=None,
        cum_seq_k=None,
        max_q=query.shape[2],
        max_k=key.shape[2],
        dropout_p=0.0,
        is_causal=tile.causal or _single_pair(tile),
        scale=scoring.softmax_scale,
    )
    both = zip(grads, (q, k, v), strict=True)
    dq, dk, dv = (grad[:, :, : t.shape[1]].transpose(1, 2) for grad, t in both)
    return dq, dk, dv


def _single_pair(tile: Tile) -> bool:
    """Whether a tile gets a second row and key of zeros, and a causal mask. The row changes
    nothing, since with out and dout 0 it has no gradient; nor does the key, since the first row
    does not attend it."""
    return tile.q1 - tile.q0 == tile.k1 - tile.k0 == 1


def _heads_first(tile: Tile, t: Tensor, *, contiguous: bool = False) -> Tensor:
    """The tile's rows or keys, [b, l, h, d] and ``contiguous`` if asked for, as [b, h, l, d]."""
    t = pad(t, (0, 0, 0, 0, 0, 1)) if _single_pair(tile) else t
    return (t.contiguous() if contiguous else t).transpose(1, 2)


@lru_cache(maxsize=8)
def _lse_dims(device: torch.device) -> int:
    """How many dims the op's lse has on this torch: [b, h, i] or [b, h, i, 1]."""
    q = torch.zeros((1, 1, 64, 64), dtype=torch.bfloat16, device=device)
    _, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query=q, key=q, value=q, attn_bias=None, compute_log_sumexp=True
    )
    return lse.ndim
