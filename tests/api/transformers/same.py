"""Results of two Hugging Face models, compared."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

from hf_models import batch, run, tiny

# Models whose norms multiply fp32 values, or whose softmax is fp32 in eager mode, are not exact.
TOLERANCE = {"gemma2": 1e-6, "llama4": 1e-6, "llama both ways": 1e-6, "cut norms": 1e-6}


def same(name: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for what, expected in want.items():
        # The loss is of fp32 logits.
        tolerance = 2e-6 if what == "loss" else TOLERANCE.get(name, 1e-10)
        largest = expected.abs().max().item()
        assert largest > 1e-4, f"{what}: nothing to compare"
        difference = (got[what] - expected).abs().max().item() / max(1.0, largest)
        assert difference < tolerance, f"{name}, {what}: {difference:.1e}"


def refused(changed: dict[str, Any], name: str = "llama", case: str = "plain") -> str:
    model = tiny(name, layers=1)
    with pytest.raises((ValueError, NotImplementedError)) as error:
        run(model, "seqshard", batch(case) | changed)
    return str(error.value)
