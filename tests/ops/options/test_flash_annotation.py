"""``flash_attention_anno`` of the modules that have it in nnscaler."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

PACKED = ("ring_attn_varlen", "sliding_window_attn", "zigzag_allgather_attn_varlen")
DENSE = ("ring_attn", "zigzag_attn", "sliding_window_attn")
CU = [0, 3, 8]


def module_named(name: str) -> Any:
    return importlib.import_module(f"customized_ops.ring_attention.{name}")


def q_k_v(*lead: int, heads: int = 4) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*lead, n, 8) for n in (heads, 4, 4))


@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str) -> None:
    """lse is [heads, tokens], as the function returns it."""
    anno = module_named(name).flash_attention_anno
    given = (*q_k_v(8), CU, CU, None)
    keys = "al^" if "allgather" in name else "l"
    inputs = f"l num_heads hd^, {keys} num_heads hd^, {keys} num_heads vd^, e^, e^, ?"
    by_position = (0.0, None, False, (-1, -1), False, False, True, False, None, True)
    assert anno(*given) == f"{inputs} -> l num_heads vd^"
    for text in (anno(*given, return_lse=True), anno(*given, *by_position)):
        assert text == f"{inputs} -> l num_heads vd^, num_heads l"
    call = getattr(module_named(name), f"wrap_{name}_func")
    assert [tuple(x.shape) for x in call(*given, return_lse=True)] == [(8, 4, 8), (4, 8)]


@pytest.mark.parametrize("name", PACKED)
def test_grouped_heads_and_slopes(name: str) -> None:
    text = module_named(name).flash_attention_anno(*q_k_v(8, heads=12), CU, CU, torch.ones(12))
    keys = "al^" if "allgather" in name else "l"
    assert text == (
        f"l (group_num 3) hd^, {keys} group_num hd^, {keys} group_num vd^, e^, e^, (group_num 3) "
        "-> l (group_num 3) vd^"
    )


@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str) -> None:
    anno = module_named(name).flash_attention_anno
    inputs = "b l num_heads hd^, b l num_heads hd^, b l num_heads vd^"
    assert anno(*q_k_v(2, 8)) == f"{inputs} -> b l num_heads vd^"
    assert anno(*q_k_v(2, 8), return_lse=True) == f"{inputs} -> b l num_heads vd^, b num_heads l"
    assert "b l (group_num 2) hd^, b l group_num hd^" in anno(*q_k_v(2, 8, heads=8))
