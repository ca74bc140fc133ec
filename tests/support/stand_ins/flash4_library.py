"""flash-attn-4 4.0.0b36 as far as the kernel "flash4" calls it, computed densely.

Its two functions take what the library's take. Block lists are taken at their word: blocks that
are listed as full are not masked, those listed as partial are masked by ``mask_mod``, others are
skipped; so a wrong list gives wrong results.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from library_signature import signature_of
from torch import Tensor
from windows import attended, dense_mask, gradients

from customized_ops.ring_attention.core.kernels import BackwardOperands, Scoring
from customized_ops.ring_attention.core.kernels.adapters import flash4
from customized_ops.ring_attention.core.kernels.adapters.flash4_parts import (
    flash4_blocks,
    flash4_library,
)
from customized_ops.ring_attention.core.kernels.window.library_calls import Packing

FORWARD = (
    "q k v | qv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k "
    "min_seqlen_k page_table softmax_scale causal softcap window_size_left window_size_right "
    "learnable_sink tile_mn mma_pv_is_rs intra_wg_overlap num_threads num_splits pack_gqa _arch "
    "score_mod mask_mod block_sparse_tensors return_lse out lse aux_tensors aux_scalars q_descale "
    "k_descale v_descale gather_kv_indices scheduler_metadata seqlen_k_per_split "
    "disable_scheduler_metadata gather_bwd_recompute_p"
)
BACKWARD = (
    "q k v out dout lse | softmax_scale causal softcap window_size_left window_size_right "
    "m_block_size n_block_size num_threads pack_gqa num_stages_Q num_stages_dO SdP_swapAB "
    "dKV_swapAB dQ_swapAB AtomLayoutMSdP AtomLayoutNdKV AtomLayoutMdQ V_in_regs cu_seqlens_q "
    "cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k deterministic dq dk dv score_mod "
    "score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors dlse learnable_sink"
)


class BlockSparseTensorsTorch(NamedTuple):
    """The library's."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


class Library:
    """``calls``: the names given to each call, with its function's name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def _bind(self, name: str, arguments: str, given: dict[str, Any]) -> SimpleNamespace:
        self.calls.append((name, given))
        bound = signature_of(arguments).bind(**given)
        bound.apply_defaults()
        return SimpleNamespace(**bound.arguments)

    def forward(self, **given: Any) -> tuple[Tensor | None, ...]:
        a = self._bind("_flash_attn_fwd", FORWARD, given)
        assert a.return_lse is True
        q, k, v = (_batched(t, a) for t in (a.q, a.k, a.v))
        out, lse = attended(q, k, v, _mask(a, q, k, forward=True), _scoring(a))
        if a.cu_seqlens_q is not None:
            out, lse = out[0], lse[0]
        return _written(out, a.out), _written(lse, a.lse), None, None, None

    def backward(self, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
        a = self._bind("_flash_attn_bwd", BACKWARD, given)
        assert a.softcap is not None, "the library compares softcap with 0.0"
        sparse = a.block_sparse_tensors is not None
        assert not (a.deterministic and sparse), "deterministic is not implemented for block lists"
        q, k, v, out, dout = (_batched(t, a) for t in (a.q, a.k, a.v, a.out, a.dout))
        assert q.dtype == k.dtype == v.dtype == out.dtype == dout.dtype
        lse, dlse = (t if t is None or t.ndim == 3 else t[None] for t in (a.lse, a.dlse))
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        given = BackwardOperands(dout, q, k, v, out, lse, dlse)
        made = gradients(given, _mask(a, q, k, forward=False), _scoring(a))
        dq, dk, dv = (t if a.cu_seqlens_q is None else t[0] for t in made)
        return _written(dq, a.dq), _written(dk, a.dk), _written(dv, a.dv)


def _written(result: Tensor, into: Tensor | None) -> Tensor:
    """``result``, in the caller's tensor if it gave one."""
    if into is None:
        return result
    assert into.shape == result.shape and into.dtype == result.dtype and into.stride(-1) == 1
    return into.copy_(result)


def install(monkeypatch: pytest.MonkeyPatch, library: Library) -> ModuleType:
    """Put ``library`` where flash-attn-4 would be, on Hopper; returns its module of functions."""

    def module(name: str, **contents: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    def _flash_attn_fwd(**given: Any) -> tuple[Tensor | None, ...]:
        return library.forward(**given)

    def _flash_attn_bwd(**given: Any) -> tuple[Tensor, Tensor, Tensor]:
        return library.backward(**given)

    _flash_attn_fwd.__signature__ = signature_of(FORWARD)  # type: ignore[attr-defined]
    _flash_attn_bwd.__signature__ = signature_of(BACKWARD)  # type: ignore[attr-defined]
    interface = module(
        "flash_attn.cute.interface",
        torch=torch,
        _flash_attn_fwd=_flash_attn_fwd,
        _flash_attn_bwd=_flash_attn_bwd,
    )
    sparsity = module(
        "flash_attn.cute.block_sparsity", BlockSparseTensorsTorch=BlockSparseTensorsTorch
    )
    utils = module("flash_attn.cute.utils", scalar_to_ssa=lambda value, dtype: value)
    cute = module(
        "flash_attn.cute", interface=interface, block_sparsity=sparsity, utils=utils, __path__=[]
    )
    module("flash_attn", cute=cute, __path__=[], __spec__=SimpleNamespace())
    for module_of_ours in (flash4_blocks, flash4_library):
        monkeypatch.setattr(module_of_ours, "interface", lambda: interface)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    flash4_blocks.attended.cache_clear()
    flash4.missing.cache_clear()
    # What mask_mod functions are written in, on tensors instead of a kernel's values.
    jit = module("cutlass.cute", jit=lambda function: function)
    module("cutlass", cute=jit, Int32=torch.int32, range_constexpr=range, __path__=[])
    return interface


def _batched(t: Tensor, a: SimpleNamespace) -> Tensor:
    return t if a.cu_seqlens_q is None else t.unsqueeze(0)


def _scoring(a: SimpleNamespace) -> Scoring:
    return Scoring(a.softmax_scale, a.softcap or 0.0)


def _mask(a: SimpleNamespace, q: Tensor, k: Tensor, *, forward: bool) -> Tensor:
    """bool[rows, keys]."""
    rows, keys = q.shape[1], k.shape[1]
    if a.block_sparse_tensors is not None:
        assert a.cu_seqlens_q is None and not a.causal
        assert a.window_size_left is None and a.window_size_right is None
        return _listed(a, rows, keys, q.shape[-1], forward)
    assert a.mask_mod is None and a.aux_tensors is None
    left, right = (-1 if x is None else x for x in (a.window_size_left, a.window_size_right))
    for given in (a.window_size_left, a.window_size_right):
        assert given is None or given >= 0, "a negative bound is a bound"
    if a.causal:
        assert (left, right) == (-1, -1)
        right = 0
    assert a.causal or (left, right) != (-1, 0), "causal has kernels of its own"
    if a.cu_seqlens_q is None:
        return dense_mask(rows, keys, (left, right), None)
    cu = a.cu_seqlens_q, a.cu_seqlens_k
    assert all(x.dtype == torch.int32 for x in cu)
    assert all(type(x) is int for x in (a.max_seqlen_q, a.max_seqlen_k))
    return dense_mask(rows, keys, (left, right), Packing(*cu, a.max_seqlen_q, a.max_seqlen_k))


def _listed(a: SimpleNamespace, rows: int, keys: int, head_dim: int, forward: bool) -> Tensor:
    """What block lists and ``mask_mod`` say."""
    lists = a.block_sparse_tensors
    block_q, block_k = lists.block_size
    assert block_q == 128
    assert block_k == (128 if head_dim <= 128 else 96 if head_dim <= 192 else 64)
    # The kernel asks for whole blocks of rows, beyond the last one too.
    q_idx = torch.arange(-(-rows // 128) * 128)[None, :, None]
    in_part = a.mask_mod(0, 0, q_idx, torch.arange(keys)[None], None, a.aux_tensors)[:rows]
    mask = torch.zeros(rows, keys, dtype=torch.bool)
    sizes = -(-rows // block_q), -(-keys // block_k)
    one, other = sizes if forward else sizes[::-1]
    seen = set()
    for cnt, idx, full in (
        (lists.mask_block_cnt, lists.mask_block_idx, False),
        (lists.full_block_cnt, lists.full_block_idx, True),
    ):
        assert cnt.dtype == idx.dtype == torch.int32
        assert cnt.shape == (1, 1, one) and idx.shape[:3] == (1, 1, one) and idx.shape[3] <= other
        for n in range(one):
            listed = idx[0, 0, n, : cnt[0, 0, n]].tolist()
            assert listed == sorted(set(listed))
            for m in listed:
                i, j = (n, m) if forward else (m, n)
                assert (i, j) not in seen, "a block is listed twice"
                seen.add((i, j))
                cell = slice(i * block_q, (i + 1) * block_q), slice(j * block_k, (j + 1) * block_k)
                mask[cell] = True if full else in_part[cell]
    return mask
