"""The window function of flash-attn 3 on CPUs, with the true signatures of two versions."""

from flash_libraries import Standin, install, window_of_flash3


def flash3_standin(monkeypatch):
    """The hopper folder as it is since the autumn of 2025."""
    standin = Standin(window_of_flash3)

    def _flash_attn_forward(
        q,
        k,
        v,
        k_new=None,
        v_new=None,
        qv=None,
        out_=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        cu_seqlens_k_new=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        page_table=None,
        kv_batch_idx=None,
        leftpad_k=None,
        rotary_cos=None,
        rotary_sin=None,
        seqlens_rotary=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=1,
        pack_gqa=None,
        sm_margin=0,
    ):
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
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        sequed_q=None,
        sequed_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        dq=None,
        dk=None,
        dv=None,
        softmax_scale=None,
        is_causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        deterministic=False,
        sm_margin=0,
    ):
        rows = dout, q, k, v, out, softmax_lse
        window = window_size_left, window_size_right
        packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        how = softmax_scale, softcap, window, is_causal, packed
        grads = standin.backward(*rows, *how, deterministic=deterministic)
        for given, grad in zip((dq, dk, dv), grads, strict=True):
            given.copy_(grad)

    install(monkeypatch, "flash_attn_interface", _flash_attn_forward, _flash_attn_backward)
    return standin


def flash3_of_2_8_standin(monkeypatch):
    """The hopper folder of release 2.8: a pair for the window, nothing has a default in front of
    what we give, and backward says causal."""
    standin = Standin(window_of_flash3)

    def _flash_attn_forward(
        q,
        k,
        v,
        k_new,
        v_new,
        qv,
        out,
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_k_new,
        seqused_q,
        seqused_k,
        max_seqlen_q,
        max_seqlen_k,
        page_table,
        kv_batch_idx,
        leftpad_k,
        rotary_cos,
        rotary_sin,
        seqlens_rotary,
        q_descale,
        k_descale,
        v_descale,
        softmax_scale,
        causal,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=1,
        pack_gqa=None,
        sm_margin=0,
    ):
        assert qv is None and out is None and rotary_cos is None
        packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return standin.forward(q, k, v, softmax_scale, softcap, window_size, causal, packed)

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        cu_seqlens_k,
        sequed_q,
        sequed_k,
        max_seqlen_q,
        max_seqlen_k,
        dq,
        dk,
        dv,
        softmax_scale,
        causal,
        window_size=(-1, -1),
        softcap=0.0,
        deterministic=False,
        sm_margin=0,
    ):
        rows = dout, q, k, v, out, softmax_lse
        packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        how = softmax_scale, softcap, window_size, causal, packed
        grads = standin.backward(*rows, *how, deterministic=deterministic)
        for given, grad in zip((dq, dk, dv), grads, strict=True):
            given.copy_(grad)

    install(monkeypatch, "flash_attn_interface", _flash_attn_forward, _flash_attn_backward)
    return standin
