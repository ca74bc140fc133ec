"""What both benchmarks of training are told: the sizes of a Llama, and where it is trained."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from shared.llama import LlamaConfig

from benchmark.command import heads

LOSSES_APART = 2e-2  # allowed in bf16, for losses of about 12


def add_llama(add: Callable[..., Any]) -> None:
    """Options: the model's sizes, 1B by default; its dtype, and its ranks."""
    add("--dim", type=int, default=2048)
    add("--layers", type=int, default=16)
    add("--heads", type=heads, default="32:8", help="of queries : of keys")
    add("--hidden", type=int, default=8192)
    add("--vocab", type=int, default=128_256)
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="computed in")
    add("--ranks", type=int, help="start so many processes here, rather than under torchrun")
    add("--device", choices=("cuda", "cpu"), default="cuda")


def llama_config(args: argparse.Namespace, **how: Any) -> LlamaConfig:
    """The model, whose loss never makes the logits of all tokens at once. how: further fields."""
    q_heads, kv_heads = args.heads
    return LlamaConfig(
        dim=args.dim,
        layers=args.layers,
        heads=q_heads,
        kv_heads=kv_heads,
        hidden=args.hidden,
        vocab=args.vocab,
        rope_base=500_000.0,
        chunked=True,
        **how,
    )
