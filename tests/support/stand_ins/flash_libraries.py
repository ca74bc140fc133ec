"""The window functions of torch and of flash-attn 2 and 3 on CPUs, with their true signatures."""

import sys
from types import ModuleType

import torch
from library_signature import signature_of, signature_of_op, takes
from windows import Library

from customized_ops.ring_attention.core.kernels import BackwardOperands, ForwardOperands, Scoring
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
    forward, backward = "_flash_attention_forward", "_flash_attention_backward"

    def common(a):
        assert a.dropout_p == 0.0
        window = a.window_size_left, a.window_size_right
        return a.scale, 0.0, window, a.is_causal, (a.cum_seq_q, a.cum_seq_k, a.max_q, a.max_k)

    @takes(signature_of_op(forward))
    def run_forward(a):
        assert a.return_debug_mask is False
        out, lse = standin.forward(a.query, a.key, a.value, *common(a))
        return out, lse, None, None, None

    @takes(signature_of_op(backward))
    def run_backward(a):
        mode = torch.get_deterministic_debug_mode()
        rows = (a.grad_out, a.query, a.key, a.value, a.out, a.logsumexp)
        return standin.backward(*rows, *common(a), deterministic=mode == 2)

    monkeypatch.setattr(torch.ops.aten, forward, run_forward)
    monkeypatch.setattr(torch.ops.aten, backward, run_backward)
    return standin


# What the functions of each version take: before the bar what has no default.
FLASH2_OF_2_8 = {
    "_flash_attn_forward": "q k v dropout_p softmax_scale causal window_size_left "
    "window_size_right softcap alibi_slopes return_softmax",
    "_flash_attn_varlen_forward": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    "dropout_p softmax_scale causal | window_size_left window_size_right softcap alibi_slopes "
    "return_softmax block_table leftpad_k seqused_k zero_tensors",
    "_flash_attn_backward": "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal "
    "window_size_left window_size_right softcap alibi_slopes deterministic | rng_state",
    "_flash_attn_varlen_backward": "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k "
    "max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size_left window_size_right "
    "softcap alibi_slopes deterministic | rng_state zero_tensors",
}
# The hopper folder as it is since the autumn of 2025.
FLASH3 = {
    "_flash_attn_forward": "q k v | k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new "
    "seqused_q seqused_k max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos "
    "rotary_sin seqlens_rotary q_descale k_descale v_descale softmax_scale causal window_size_left "
    "window_size_right attention_chunk softcap rotary_interleaved scheduler_metadata num_splits "
    "pack_gqa sm_margin",
    "_flash_attn_backward": "dout q k v out softmax_lse | cu_seqlens_q cu_seqlens_k sequed_q "
    "sequed_k max_seqlen_q max_seqlen_k dq dk dv softmax_scale is_causal window_size_left "
    "window_size_right softcap deterministic sm_margin",
}
# The hopper folder of release 2.8: a pair for the window, nothing has a default in front of what we
# give, and backward says causal.
FLASH3_OF_2_8 = {
    "_flash_attn_forward": "q k v k_new v_new qv out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new "
    "seqused_q seqused_k max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos "
    "rotary_sin seqlens_rotary q_descale k_descale v_descale softmax_scale causal | window_size "
    "attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin",
    "_flash_attn_backward": "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q "
    "sequed_k max_seqlen_q max_seqlen_k dq dk dv softmax_scale causal | window_size softcap "
    "deterministic sm_margin",
}

# What the adapters leave as it is, where a function takes it.
NOT_ASKED = {
    "dropout_p": 0.0,
    "alibi_slopes": None,
    "return_softmax": False,
    "qv": None,
    "rotary_cos": None,
}


def flash2_standin(monkeypatch):
    return package_standin(
        monkeypatch, "flash_attn.flash_attn_interface", FLASH2_OF_2_8, window_of_flash2
    )


def flash3_standin(monkeypatch):
    return package_standin(monkeypatch, "flash_attn_interface", FLASH3, window_of_flash3)


def flash3_of_2_8_standin(monkeypatch):
    return package_standin(monkeypatch, "flash_attn_interface", FLASH3_OF_2_8, window_of_flash3)


def package_standin(monkeypatch, name, signatures, window_of):
    """A module of functions with these signatures, under ``name``."""
    standin = Standin(window_of)

    def common(a):
        """How a call attends, from whichever of these arguments its function takes."""
        given = vars(a)
        assert all(given.get(name, value) == value for name, value in NOT_ASKED.items())
        causal = given["is_causal" if "is_causal" in given else "causal"]
        window = given.get("window_size") or (a.window_size_left, a.window_size_right)
        packed = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return a.softmax_scale, a.softcap, window, causal, tuple(map(given.get, packed))

    def forward(a):
        assert vars(a).get("out") is None
        out, lse = standin.forward(a.q, a.k, a.v, *common(a))
        return out, lse, None, None

    def backward(a):
        rows = a.dout, a.q, a.k, a.v, a.out, a.softmax_lse
        grads = standin.backward(*rows, *common(a), deterministic=a.deterministic)
        for given, grad in zip((a.dq, a.dk, a.dv), grads, strict=True):
            given.copy_(grad)

    functions = {}
    for function, arguments in signatures.items():
        computed = forward if function.endswith("forward") else backward
        functions[function] = takes(signature_of(arguments))(computed)
    install(monkeypatch, name, **functions)
    return standin


def install(monkeypatch, name, **functions):
    """A module of these functions, under ``name``."""
    module = ModuleType(name)
    vars(module).update(functions)
    for end in range(name.count("."), 0, -1):
        parent = name.rsplit(".", end)[0]
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
