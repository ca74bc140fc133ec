"""Gradients divided among the ranks that compute a result whole, in code that engines generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def divided(results: Any, parts: Sequence[int]) -> Any:
    """What an op has just returned; its backward will get gradients that are divided.

    Nothing is copied, and the results may be changed in place afterwards.

    Args:
        results: a tensor or a tuple of tensors.
        parts: by how much the gradient of each is divided.
    Returns:
        ``results``.
    """
    each = (results,) if isinstance(results, Tensor) else results
    for result, n in zip(each, parts, strict=True):
        if n > 1 and result.requires_grad:
            # Of a result that is not used, the gradient is None.
            result.register_hook(lambda grad, n=n: grad if grad is None else grad / n)
    return results
