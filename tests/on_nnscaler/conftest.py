"""Where nnscaler is missing, no module of this folder is imported: all of them need it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import pytest


class Skipped(pytest.Module):
    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip("nnscaler is not installed: see CONTRIBUTING.md", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if importlib.util.find_spec("nnscaler") is None:
        return Skipped.from_parent(parent, path=module_path)
    return None
