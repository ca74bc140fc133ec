"""nnscaler's own tests of ring attention, over its modules delegating to ours, on CPUs.

They need its sources: ``NNSCALER_SOURCE=../nnscaler pytest -m slow tests/on_nnscaler``. A copy of
them runs, on the device "cpu", with gloo, and with sequences and windows a 32nd as long.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nnscaler, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
FOLDER = "tests/customized_ops/ring_attn"
TESTS = 70


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    if "NNSCALER_SOURCE" not in os.environ:
        pytest.skip("NNSCALER_SOURCE does not name nnscaler's sources")
    source = Path(os.environ["NNSCALER_SOURCE"])
    shutil.copytree(source / "tests", tmp_path / "tests")
    shutil.copy(source / "pyproject.toml", tmp_path)
    for path in (tmp_path / FOLDER).glob("*.py"):
        on_cpu = re.sub(
            r"torch\.device\(f.cuda:\{\w+\}.\)", "torch.device('cpu')", path.read_text()
        )
        path.write_text(on_cpu.replace("nccl", "gloo"))
    configs = tmp_path / FOLDER / "configs.py"
    text = configs.read_text().replace(
        "    def __post_init__(self):\n",
        "    def __post_init__(self):\n"
        "        self.max_seqlen //= 32\n"
        "        self.window_size = tuple(n // 32 if n > 0 else n for n in self.window_size)\n",
    )
    assert "//= 32" in text
    configs.write_text(text)
    return tmp_path


def test_all_pass(suite: Path) -> None:
    stand_ins = ROOT / "tests" / "on_nnscaler" / "stand_ins"
    path = [stand_ins, ROOT, ROOT / "tests", suite]
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "MASTER_PORT": "0",  # a free one, so that two runs do not meet
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", FOLDER, "-q", "-x", "-p", "no:cacheprovider"],
        cwd=suite,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    summary = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0 and summary.startswith(f"{TESTS} passed"), done.stdout[-5000:]
    assert "skipped" not in summary
