"""``flash_attention_anno`` of the public modules: a call's annotation in nnscaler's words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def flash_annotation(function: Callable[..., Any], keys: str = "l") -> Callable[..., str]:
    """``flash_attention_anno`` of an attention function, for wrappers of it that a user registers
    with nnscaler himself.

    Args:
        keys: how tokens of k and v are annotated.
    """
    names = list(inspect.signature(function).parameters)

    def flash_attention_anno(
        query_states: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any
    ) -> str:
        """The annotation of a call: its tensors, then out and, with ``return_lse``, lse with heads
        before tokens. Arguments are those of the attention function; tensors by shape alone."""
        given = dict(zip(names, (query_states, key_states, value_states, *args), strict=False))
        given |= kwargs
        h, g = query_states.shape[-2], key_states.shape[-2]
        of_q, of_k = ("num_heads",) * 2 if h == g else (f"(group_num {h // g})", "group_num")
        packed = len(query_states.shape) == 3
        lead = "" if packed else "b "
        inputs = [
            f"{lead}l {of_q} hd^",
            f"{lead}{keys} {of_k} hd^",
            f"{lead}{keys} {of_k} vd^",
        ]
        if packed:
            slopes = given.get("alibi_slopes")
            inputs += ["e^", "e^", of_q if hasattr(slopes, "shape") else "?"]
        lse = f", {lead}{of_q} l" if given.get("return_lse") else ""
        return f"{', '.join(inputs)} -> {lead}l {of_q} vd^{lse}"

    return flash_attention_anno
