"""Tests of tapes."""

from __future__ import annotations

from importlib import import_module

import pytest

# The module; in its package the name is that of the folder's.
TAPES = import_module("customized_ops.ring_attention.core.tape.tape")


@pytest.fixture(autouse=True, params=[TAPES.OFTEN, 0], ids=["step by step", "compiled"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How tapes run."""
    TAPES._code_of.cache_clear()
    monkeypatch.setattr(TAPES, "OFTEN", request.param)
