"""Names that programs import to see whether flash-attn is installed; nothing here computes."""

from typing import Any


def flash_attn_func(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("flash-attn itself was called")


flash_attn_varlen_func = flash_attn_func
