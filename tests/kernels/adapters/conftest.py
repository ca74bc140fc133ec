"""Stand-ins for the libraries of kernels."""

from __future__ import annotations

import pytest
from flash4_library import Library

from .flash4_cases import make_library


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """That of flash-attn-4, installed where the real one would be."""
    return make_library(monkeypatch)
