"""Groups at the end of a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, sys, weakref
import torch.distributed as dist
kept = []
atexit.register(lambda: print("freed" if kept[0]() is None else "kept", flush=True))
from customized_ops.ring_attention.core.comm.comm_groups import comm_by_name
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
kept.append(weakref.ref(dist.group.WORLD))
comm = comm_by_name(dist.group.WORLD.group_name)
assert comm.all_gather_object(3) == [3]
dist.destroy_process_group()
del comm
"""


@pytest.mark.slow
def test_a_destroyed_group_is_freed_before_python_ends(tmp_path: Path) -> None:
    """Else a thread of gloo may let go of a tensor while Python ends, which aborts the process."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "freed\n"), ended.stderr
