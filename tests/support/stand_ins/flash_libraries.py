"""The window functions of torch and of flash-attn 2 on CPUs, with their true signatures."""

import sys
from types import ModuleType, SimpleNamespace

import torch
from windows import Library

from customized_ops.ring_attention.core.kernels import (
    BackwardOperands,
    ForwardOperands,
    Scoring,
)
from customized_ops.ring_attention.core.kernels.window.library_calls import LibraryCall, Packing


def window_of_flash2(left, right, causal, max_q, max_k):
    """What FlashAttention-2 makes of a window: bounds of more than the keys count as none, and none
    beside another as that many."""
    right = 0 if causal else right
    left = -1 if left >= max_k else left
    right = -1 if right >= max_k else right
    if left >= 0 > right:
        right = max_k
    return left, right


def window_of_flash3(left, right, causal, max_q, max_k):
    right = 0 if causal else right
    return -1 if left >= max_k - 1 else left, -1 if right >= max_q - 1 else right


class Standin:
    """Computes densely what a library is asked, and keeps what it was told."""

    def __init__(self, window_of):
        self.library, self.window_of, self.told = Library(), window_of, []

    def _arranged(self, q, k, window, causal, sequences, told):
        """Window and packing of the dense stand-in."""
        self.told.append(told)
        packing = None if sequences[0] is None else Packing(*sequences)
        longest = sequences[2:] if packing else (q.shape[1], k.shape[1])
        window = self.window_of(*window, causal, *longest)
        if self.window_of is window_of_flash2 and packing and longest[0] == 1:
            # Heads that share a kv head become rows, reckoned as if every sequence had one.
            assert len(q) == len(packing.cu_seqlens_q) - 1, "a sequence without rows"
        return window, packing

    def forward(self, q, k, v, scale, softcap, window, causal, sequences, **told):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
        window, packing = self._arranged(q, k, window, causal, sequences, told)
        return self.library.forward(
            ForwardOperands(q, k, v), LibraryCall(window, packing), Scoring(scale, softcap)
        )

    def backward(self, dout, q, k, v, out, lse, scale, softcap, window, causal, sequences, **told):
        assert len({t.shape[-1] for t in (dout, q, k, v, out)}) == 1 and q.shape[-1] % 8 == 0
        assert lse.is_contiguous(), "it is read by its address"
        window, packing = self._arranged(q, k, window, causal, sequences, told)
        call, scoring = LibraryCall(window, packing), Scoring(scale, softcap)
        given = BackwardOperands(dout, q, k, v, out, lse)
        return self.library.backward(given, call, scoring, deterministic=False)


def torch_standin(monkeypatch):
    """In place of torch's two ops, which take what their schemas say."""
    standin = Standin(window_of_flash2)
    forward, backward = (
        getattr(torch.ops.aten, name).default._schema.arguments
        for name in ("_flash_attention_forward", "_flash_attention_backward")
    )

    def bound(arguments, given):
        names = {a.name for a in arguments}
        assert set(given) <= names
        assert {a.name for a in arguments if not a.has_default_value()} <= set(given)
        assert given["dropout_p"] == 0.0
        return SimpleNamespace(**dict.fromkeys(names) | given)

    def common(a):
        window = a.window_size_left, a.window_size_right
        return a.scale, 0.0, window, a.is_causal, (a.cum_seq_q, a.cum_seq_k, a.max_q, a.max_k)

    def run_forward(**given):
        a = bound(forward, given)
        assert a.return_debug_mask is False
        out, lse = standin.forward(a.query, a.key, a.value, *common(a))
        return out, lse, None, None, None

    def run_backward(**given):
        a = bound(backward, given)
        mode = torch.get_deterministic_debug_mode()
        rows = (a.grad_out, a.query, a.key, a.value, a.out, a.logsumexp)
        return standin.backward(*rows, *common(a), deterministic=mode == 2)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", run_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", run_backward)
    return standin


def flash2_standin(monkeypatch):
    """flash_attn 2.8."""
    standin = Standin(window_of_flash2)
    alone = (None, None, None, None)

    def _flash_attn_forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    ):
        assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
        window = window_size_left, window_size_right
        out, lse = standin.forward(q, k, v, softmax_scale, softcap, window, causal, alone)
        return out, lse, None, None

    def _flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
        block_table=None,
        leftpad_k=None,
        seqused_k=None,
        zero_tensors=False,
    ):
        assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
        window = window_size_left, window_size_right
        packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = standin.forward(q, k, v, softmax_scale, softcap, window, causal, packed)
        return out, lse, None, None

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
    ):
        assert (dropout_p, alibi_slopes) == (0.0, None)
        rows = dout, q, k, v, out, softmax_lse
        window = window_size_left, window_size_right
        how = softmax_scale, softcap, window, causal, alone
        grads = standin.backward(*rows, *how, deterministic=deterministic)
        for given, grad in zip((dq, dk, dv), grads, strict=True):
            given.copy_(grad)

    def _flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
        zero_tensors=False,
    ):
        assert (dropout_p, alibi_slopes) == (0.0, None)
        rows = dout, q, k, v, out, softmax_lse
        window = window_size_left, window_size_right
        packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        how = softmax_scale, softcap, window, causal, packed
        grads = standin.backward(*rows, *how, deterministic=deterministic)
        for given, grad in zip((dq, dk, dv), grads, strict=True):
            given.copy_(grad)

    install(
        monkeypatch,
        "flash_attn.flash_attn_interface",
        _flash_attn_forward,
        _flash_attn_varlen_forward,
        _flash_attn_backward,
        _flash_attn_varlen_backward,
    )
    return standin


def install(monkeypatch, name, *functions):
    """A module of these functions, under ``name``."""
    module = ModuleType(name)
    for function in functions:
        setattr(module, function.__name__, function)
    for end in range(name.count("."), 0, -1):
        parent = name.rsplit(".", end)[0]
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
