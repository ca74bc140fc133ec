"""Thin faces of this package under the names that users of other packages import.

Each starts with what names and arguments there are here, what is refused and why.

| module | names of |
|---|---|
| `yunchang` | yunchang (long-context-attention, USP) |
| `ring_flash_attn` | ring_flash_attn (ring-flash-attention) |
| `ring_swa` | ring_swa (ring-sliding-window-attention) |
| `magi_attention` | MagiAttention |
| `torch_context_parallel` | PyTorch's context_parallel |
| `transformers` | Hugging Face transformers: an attention implementation |
"""
