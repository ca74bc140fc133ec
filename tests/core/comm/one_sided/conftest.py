"""Tests of ranks that write into one another's memory."""

from __future__ import annotations

from typing import Any

import pytest
from one_sided_memory import InProcessOneSided, SparingOneSided

from customized_ops.ring_attention.core.comm import inprocess


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    """How ranks may be connected."""
    return {
        "messages": inprocess.InProcessComm,
        "one-sided": InProcessOneSided,
        "sparing": SparingOneSided,
    }
