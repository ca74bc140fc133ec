"""What counts as a difference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from customized_ops.ring_attention.probes.evidence import Evidence


@pytest.mark.parametrize(("rounding", "alike"), [(0.0, False), (5 * 2**-7, True)])
def test_a_label_that_changes_nothing(rounding: float, alike: bool) -> None:
    """It is lost; but a loss near 5 in bf16 does not tell 0.06 from nothing."""
    evidence: Any = SimpleNamespace(near_loss=0.25, seen=[SimpleNamespace(rounding=rounding)])
    assert Evidence.counts_alike(evidence, 0.06, 0.0) is alike
