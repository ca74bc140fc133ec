"""Cases that every kernel is tried on: each axis against a base, and seeded draws over all axes.

    axis      values
    mask      MASKS of masks.py
    heads     8:8, 8:2, 8:1                  of q and of k and v
    dims      64, 96, 128, (192, 128), 256   of q and k, and of v
    dtype     bfloat16, float16, float32
    softcap, learnable sink, gradient of lse, batch 2, odd lengths
    strides   dense, heads first, slices of a fused qkv
    values    gaussian, outliers (heavy-tailed channels), llama (a small Llama's on real text)

Kernels that compile do so once for a :meth:`Case.configuration`, so the draws are few there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import Tensor

from customized_ops.ring_attention import AttnMask
from customized_ops.ring_attention.core.kernels import FEATURES, Request, Scoring
from customized_ops.ring_attention.core.mask.slices import K0, LO, Q1

from .masks import MASKS


@dataclass(frozen=True)
class Case:
    """One problem for one kernel. The defaults are the base."""

    tokens: int
    mask: str = "causal"
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    softcap: float = 0.0
    sink: bool = False
    lse_gradient: bool = False
    deterministic: bool = False
    strides: str = "dense"
    values: str = "gaussian"

    def __str__(self) -> str:
        """The mask, and what is not as in the base."""
        base = Case(self.tokens, self.mask)
        names = (field.name for field in fields(self))
        other = {n: getattr(self, n) for n in names if getattr(self, n) != getattr(base, n)}
        told = [f"{n}={str(value).removeprefix('torch.')}" for n, value in other.items()]
        return ", ".join([f"{self.mask} {self.tokens}", *told])

    @property
    def configuration(self) -> str:
        """What a kernel may compile for; cases that share it run in one process."""
        (h, g), (d, e) = self.heads, self.dims
        asked = ("softcap", "lse_gradient", "deterministic")
        special = [name for name in asked if getattr(self, name)]
        kind = MASKS[self.mask].shape_class
        if kind == "packed":
            kind = self.mask
        return " ".join([f"{str(self.dtype)[6:]} {d}:{e} {h // g}x {kind}", *special])

    @property
    def scoring(self) -> Scoring:
        """How scores become probabilities."""
        return Scoring(self.dims[0] ** -0.5, self.softcap)

    def make_mask(self) -> AttnMask:
        """Which pairs attend."""
        return MASKS[self.mask].make(self.tokens)

    def request(self, device: str) -> Request:
        """What is asked of a kernel."""
        slices = self.make_mask().slices
        needs = {
            "softcap": self.softcap > 0,
            "window": bool((slices[:, LO] > slices[:, K0] - slices[:, Q1] + 1).any()),
            "lse gradient": self.lse_gradient,
            "deterministic": self.deterministic,
        }
        return Request(
            device=torch.device(device),
            dtype=self.dtype,
            head_dim=self.dims[0],
            v_dim=self.dims[1],
            q_heads=self.heads[0],
            kv_heads=self.heads[1],
            features=tuple(name for name in FEATURES if needs.get(name)),
            shape_class=MASKS[self.mask].shape_class,
            tokens=self.make_mask().k_len,
        )


def cases(device: str) -> list[Case]:
    """All cases; smaller ones for the CPU."""
    base = Case(576 if device == "cuda" else 120)
    odd = base.tokens + 25
    axes: list[dict[str, object]] = [
        *({"mask": mask} for mask in MASKS),
        *({"mask": mask, "tokens": odd} for mask in ("causal", "full", "blocks", "window back")),
        *({"heads": heads} for heads in [(8, 8), (8, 1)]),
        *({"dims": dims} for dims in [(64, 64), (96, 96), (192, 128), (256, 256)]),
        *({"dtype": dtype} for dtype in (torch.float16, torch.float32)),
        *({"batch": 2, "mask": mask} for mask in ("causal", "packed", "blocks")),
        {"softcap": 15.0},
        {"sink": True},
        {"sink": True, "mask": "rows without keys"},
        {"lse_gradient": True},
        *({"strides": strides} for strides in ("heads first", "fused")),
        *({"values": values} for values in ("outliers", "llama")),
        *(
            {"deterministic": True, "mask": m}
            for m in ("causal", "packed", "window back", "blocks")
        ),
    ]
    made = [replace(base, **axis) for axis in axes]  # type: ignore[arg-type]
    return list(dict.fromkeys([*made, *_draws(base, odd)]))


def _draws(base: Case, odd: int) -> list[Case]:
    """Several axes at once: 16 in configurations of the base, 5 in others."""
    draw = random.Random(0)
    masks = sorted(MASKS)
    free: dict[str, list[object]] = {
        "tokens": [base.tokens, odd],
        "batch": [1, 2],
        "sink": [False, False, False, True],
        "strides": ["dense", "heads first", "fused"],
        "values": ["gaussian", "outliers", "llama"],
    }
    compiled: dict[str, list[object]] = {
        "mask": ["full", "causal", "window back", "blocks", "packed"],
        "heads": [(8, 8), (8, 2), (8, 1)],
        "dims": [(64, 64), (96, 96), (192, 128), (256, 256)],
        "dtype": [torch.bfloat16, torch.float16],
        "softcap": [0.0, 0.0, 15.0],
        "lse_gradient": [False, True],
    }
    made = []
    for n in range(21):
        axes = {"mask": draw.choice(masks)}
        axes |= {name: draw.choice(values) for name, values in free.items()}
        if n >= 16:
            axes |= {name: draw.choice(values) for name, values in compiled.items()}
        made.append(replace(base, **axes))
    return made


def _whole(mask: AttnMask, case: Case) -> bool:
    """Whether q, k and v have one length and one width, as slices of one tensor do."""
    return mask.q_len == mask.k_len and case.dims[0] == case.dims[1]


@dataclass(frozen=True, eq=False)
class Inputs:
    """Tensors of a case in its dtype: q [b, i, h, d], k [b, j, g, d], v [b, j, g, e], sink [h];
    the gradients of out and, in fp32, of lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    sink: Tensor | None


def inputs(case: Case, device: str, seed: int) -> Inputs:
    """Values of a case; another ``seed``, other values."""
    mask, (h, g), (d, e) = case.make_mask(), case.heads, case.dims
    source = torch.Generator().manual_seed(seed)
    i, j, b = mask.q_len, mask.k_len, case.batch

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    q, k, v, dout = (
        gaussian(b, i, h, d),
        gaussian(b, j, g, d),
        gaussian(b, j, g, e),
        gaussian(b, i, h, e),
    )
    if case.values == "outliers":  # two channels of keys 30 times the rest, 3 times in q
        k[..., [3, d // 2 + 1]] *= 30
        q[..., [3, d // 2 + 1]] *= 3
        v[..., 0] *= 30
    elif case.values == "llama" and _whole(mask, case):
        texts = llama(case.heads, d, i, 2 * b)
        q, k, v = (t[:b] if seed % 2 else t[b:] for t in texts)
    q, k, v, dout = (t.to(case.dtype).to(device) for t in (q, k, v, dout))
    if case.strides == "heads first":
        q, k, v, dout = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, dout))
    elif case.strides == "fused" and _whole(mask, case):
        q, k, v = torch.cat([q, k, v], dim=2).split([h, g, g], dim=2)
    return Inputs(
        q,
        k,
        v,
        dout,
        gaussian(b, h, i).to(device) if case.lse_gradient else None,
        gaussian(h).to(case.dtype).to(device) if case.sink else None,
    )


@lru_cache(maxsize=8)
def llama(heads: tuple[int, int], head_dim: int, tokens: int, batch: int) -> list[Tensor]:
    """q and k (rotated) and v of the last layer of a small Llama with random weights on text."""
    from shared.llama import Llama, LlamaConfig
    from shared.text_corpus import PackedText, load_documents

    (h, g), caught = heads, []

    def attend(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
        caught[:] = [q, k, v]
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2)

    text = PackedText(load_documents(max_bytes=200_000), tokens)
    rows = [text.batch(step, packed=False) for step in range(batch)]
    config = LlamaConfig(
        dim=h * head_dim, layers=3, heads=h, kv_heads=g, hidden=2 * h * head_dim, op=attend
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Llama(config)
        names = ("tokens", "targets", "position_ids")
        model(*(torch.cat([getattr(row, name) for row in rows]) for name in names))
    return caught
