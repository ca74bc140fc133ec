"""The Hugging Face example, small: real ranks under torchrun, equal to one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "hf_finetune.py"


@pytest.mark.slow
def test_same_loss_as_on_one_rank() -> None:
    command = [sys.executable, str(SCRIPT), "--steps", "3", "--seq-len", "160"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    said = re.search(r"loss (\S+) -> (\S+)\nshown: .*difference (\S+), allowed", done.stdout)
    assert said, done.stderr
    first, last, difference = map(float, said.groups())
    assert done.returncode == 0, done.stdout
    assert last < first
    assert difference < 1e-4
