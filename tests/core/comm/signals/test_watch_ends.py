"""How a program ends whose GPU's wait has failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from customized_ops.ring_attention.core.comm.signals import record as of

from .watch_cases import BACKWARD, SAYS_WHY, Store, told, until, watched

# Programs that end by themselves or by an error, each in a process of its own, forked from one
# that has imported what takes seconds.
ENDS = """
import json, os, sys, time, warnings
from types import SimpleNamespace
import torch
import watch_cases as test
from customized_ops.ring_attention.core.comm import notes
from customized_ops.ring_attention.core.comm.signals import watch as watch_module

folder, *cases = sys.argv[1:]
children = []
for case in cases:
    if not (child := os.fork()):
        for n, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{case}.{name}", os.O_CREAT | os.O_WRONLY), n)
        break
    children.append(child)
else:
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
    sys.exit()

notes._get_process_group_store = lambda group: test.Store()
notes.dist.get_process_group_ranks = lambda group: [0, 1]
if case != "warnings are told":
    warnings.simplefilter("error" if case == "warnings are errors" else "ignore")
if case in test.SAYS_WHY:
    watch, record = test.watched()
    test.told(record, test.of.DIFFERS, test.BACKWARD)
    raise RuntimeError("CUDA error: unspecified launch failure")

def synchronize():
    if case == "stops":
        raise RuntimeError("CUDA error: unspecified launch failure")
    if case == "blocks":
        time.sleep(60)
def stop():
    if case == "stop blocks":
        time.sleep(60)
torch.cuda.current_stream = lambda device: SimpleNamespace(synchronize=synchronize)
watch_module.STOP_SECONDS, watch_module.LOOK_SECONDS = 1.5, 0.2
watch, record = test.watched(stop=stop)
watch._patience.device = torch.device("cuda", 0)
test.told(record, test.of.DIFFERS, test.BACKWARD)
time.sleep(4)
print("it goes on")
"""
TOLD_TO_STOP = ("stops", "goes on", "blocks", "stop blocks")


@pytest.mark.slow
def test_the_end_of_a_process(tmp_path: Path) -> None:
    """It says why: the thread may not have looked by then, and warnings may be errors. Where a GPU
    does not stop that was told to, the process ends, even if the driver or NCCL does not answer."""
    paths = ":".join([os.path.dirname(__file__), *sys.path])
    cases = [*SAYS_WHY, *TOLD_TO_STOP]
    command = [sys.executable, "-c", ENDS, str(tmp_path), *cases]
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    for case, code in zip(cases, json.loads(done.stdout), strict=True):
        out, err = ((tmp_path / f"{case}.{name}").read_text() for name in ("out", "err"))
        if case in SAYS_WHY:
            _, said = err.split("RuntimeError: CUDA error: unspecified launch failure\n")
            assert code == 1 and "do not agree on tensors or options" in said, (case, err)
        elif case == "stops":
            assert (code, out) == (0, "it goes on\n"), (case, err)
        else:
            assert code == -signal.SIGABRT, (case, code, err)
            said = "tensors or options; its GPU goes on 2 s later, so the process ends"
            assert said in err, (case, err)


@pytest.mark.filterwarnings("ignore:ring attention")
def test_a_gpu_is_told_to_stop_where_python_starts_no_thread(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a program."""

    def fails(*_: Any) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Timer, "start", fails)
    monkeypatch.setattr(torch.cuda, "current_stream", fails)
    stopped: list[bool] = []
    watch, record = watched(stop=lambda: stopped.append(True))
    watch._patience.device = torch.device("cuda", 0)
    told(record, of.DIFFERS, BACKWARD)
    until(lambda: stopped)
    assert record[of.STOP]
