"""A wait that nobody waits for any more, at the end of a program."""

from __future__ import annotations

import subprocess
import sys

from customized_ops.ring_attention.core.comm import waiting_thread

PROGRAM = """
import os, runpy, sys, threading, time
module = runpy.run_path(sys.argv[1])
thread = module["WaitingThread"]()
thread.do(lambda: (time.sleep(0.3), print("over", flush=True)))
began = time.monotonic()
if child := os.fork():
    os.waitpid(child, 0)
    assert time.monotonic() - began < module["LEAVE_SECONDS"], "it has no such thread"
"""


def test_it_ends_before_python_does() -> None:
    """Else the thread may come back from gloo while Python ends, which aborts the process."""
    command = [sys.executable, "-c", PROGRAM, str(waiting_thread.__file__)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "over\n"), ended.stderr
