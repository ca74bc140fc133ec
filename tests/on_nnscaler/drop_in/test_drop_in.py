"""Programs that call nnscaler's own ``parallelize`` and import nothing of the engine here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nnscaler

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("form", ["plain", "whole keys"])
def test_equals_one_process(tmp_path: Path, form: str) -> None:
    """Tokens are shuffled, and attention follows their order."""
    script = ROOT / "tests" / "on_nnscaler" / "programs" / "parallelize_with_theirs.py"
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "support")))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(script), form, str(tmp_path / "code")),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("equal") == 2
    [code] = (tmp_path / "code").rglob("gencode0.py")
    assert "layout_by_document(" in code.read_text()
