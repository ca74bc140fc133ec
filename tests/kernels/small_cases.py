"""Small masks and tensors of each kind for every kernel on CPUs."""

import pytest
import torch
import windows

from customized_ops.ring_attention.core.kernels import KERNELS, Pairs, Request, Scoring, Tokens
from customized_ops.ring_attention.core.kernels.protocol.scoring import keep
from customized_ops.ring_attention.core.mask import AttnMask

WIDE = 999  # wider than any sequence here: no bound
SCALE = 0.35

SLOPES = torch.tensor([[0.5, 0.25, 0.1, 0.03], [0.4, 0.0, 0.2, 0.05]])
SEED = torch.tensor([0x123456789ABCDEF])
SCORINGS = {
    "plain": Scoring(SCALE),
    "softcap": Scoring(SCALE, softcap=1.5),
    "alibi": Scoring(SCALE, alibi_slopes=SLOPES[:1]),
    "dropout": Scoring(SCALE, dropout_p=0.3, dropout_seed=SEED),
    "all": Scoring(SCALE, 1.5, SLOPES, 0.3, SEED),
}
PLAIN = SCORINGS["plain"]

# Names of those that every kernel attends.
KINDS = {
    name: windows.KINDS[name]
    for name in (
        "full",
        "causal square",
        "causal, more keys",
        "causal, more rows",
        "diagonal not in a corner",
        "window",
        "inverse causal",
        "several slices share rows",
        "rows out of order",
        "one shared row",
        "one key",
        "one row",
        "one diagonal",
        "uncovered rows",
        "no slices",
    )
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
HEADS = windows.HEADS

# By name: the kernel, and what it says that it can do on CPU.
ON_CPU = {
    name: (kernel, able)
    for name, kernel in KERNELS.items()
    for able in kernel.CAPABILITIES
    if able.device == "cpu"
}
over_kernels = pytest.mark.parametrize(
    "kernel", [kernel for kernel, _ in ON_CPU.values()], ids=ON_CPU
)
over_kinds = pytest.mark.parametrize("kind", KINDS)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


# What each kernel declares that it can do; that it refuses the rest is a test of its own.
ABLE = {
    f"{kernel_name}-{name}": (kernel, scoring)
    for kernel_name, (kernel, able) in ON_CPU.items()
    for name, scoring in SCORINGS.items()
    if set(scoring.features) <= set(able.features)
}
over_able = pytest.mark.parametrize(("kernel", "scoring"), ABLE.values(), ids=ABLE)


def draw(dtype, rows, keys, kv_heads, d, e):
    """q, k, v, dout in fp64, holding values of ``dtype``."""
    exact = windows.draw(2, rows, keys, kv_heads, d, e)[:4]
    return [t.to(dtype).double() for t in exact]


def tokens_of(rows, keys, device="cpu"):
    """Rows and keys in the middle of longer sequences, the two counted from different starts."""
    rows = 1000 + torch.arange(rows, device=device)
    keys = 500 + torch.arange(keys, device=device)
    return Tokens(rows, keys, keys + 498, first_head=3, first_batch=7)


def for_dense(scoring, tokens, batch=2):
    """The keywords of the dense specification that say the same."""
    kept = None
    if scoring.dropout_p:
        counts = tokens.first_head, HEADS, tokens.first_batch, batch
        kept = keep(SEED, scoring.dropout_p, tokens.rows, tokens.keys, *counts)
    slopes = scoring.alibi_slopes
    return {
        "softcap": scoring.softcap,
        "alibi_slopes": None if slopes is None else slopes[:batch],
        "keep": kept,
        "dropout_p": scoring.dropout_p,
        "key_positions": tokens.key_positions - tokens.rows[0],
    }


def pairs_of(mask):
    return Pairs(mask.slices, mask.q_len, mask.k_len)


def skip_if_refused(kernel, q, scoring=PLAIN, features=()):
    _, able = ON_CPU[kernel.NAME]
    heads = q.shape[2], q.shape[2]
    asked = (*scoring.features, *features)
    request = Request(q.device, q.dtype, q.shape[-1], q.shape[-1], *heads, asked)
    reason = able.refuses(request)
    if reason is not None:
        pytest.skip(reason)


LONG = {
    "window": AttnMask.dense(600, window=(40, 3)),
    "inverse causal": AttnMask.dense(600, 500, window=(0, -1)),
    "packed windows": AttnMask.varlen([0, 280, 281, 600], causal=True, window=(300, 0)),
}
