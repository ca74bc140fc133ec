"""Gradients divided among the ranks that compute a result whole, in code that engines generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def divided(results: Any, parts: Sequence[int]) -> Any:
    """Let the gradients of an op's results be divided before its backward gets them.

    Args:
        results: a tensor or a tuple of tensors, as the op returned them. Nothing is copied, and
            they may be changed in place afterwards.
        parts: the divisor of each gradient.
    Returns:
        ``results``.
    """
    each = (results,) if isinstance(results, Tensor) else results
    for result, n in zip(each, parts, strict=True):
        if n > 1 and result.requires_grad:
            # The gradient of an unused result is None.
            result.register_hook(lambda grad, n=n: grad if grad is None else grad / n)
    return results
