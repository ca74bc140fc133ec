"""Real ranks: P processes over gloo or NCCL, which are started once and then run jobs.

    pool.run(function, *args)   ->   [function(*args) on rank 0, on rank 1, ...]

``function`` must be importable in a fresh process. Starting P interpreters costs seconds; a job
costs milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

# Submodules too: the packages import most of what they need only on first use.
PRELOADED = [
    "torch.export._trace",
    "torch.distributed.tensor",
    "torch._inductor.sizevars",
    "annotations.engines.torch",
    "customized_ops.ring_attention",
    "customized_ops.chunk_linear_cross_entropy",
]
JOB_SECONDS = {"gloo": 240.0, "nccl": 300.0}  # flash-attn-4 compiles each kind of call for seconds
# Longer than a rank over gloo waits for another, and than a process waits for its GPU to stop.
SECONDS_AFTER_A_FAILURE = {"gloo": 20.0, "nccl": 75.0}


class JobFailed(AssertionError):
    """A job raised on some rank; carries its traceback."""


def _serve(rank: int, size: int, store: str, backend: str, seconds: float, pipe: Any) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds / 2),
    )
    gc.freeze()  # imported objects stay, so garbage collection need not scan them
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, args = job
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    """``size`` processes in one world; with NCCL each has a GPU of its own.

    A job may take ``seconds``, by default JOB_SECONDS; a rank waits for another for half of
    that. Once a rank has failed, the pool does not wait much longer for the others.
    """

    def __init__(self, size: int, backend: str = "gloo", seconds: float | None = None) -> None:
        self.size, self.backend = size, backend
        self.seconds = JOB_SECONDS[backend] if seconds is None else seconds
        self._start()

    def __str__(self) -> str:
        return pool_name(self.backend, self.size)

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("spawn")
        if self.backend == "gloo":  # forked from a process that has already done the slow imports
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes, self._processes = [], []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            args = (rank, self.size, store, self.backend, self.seconds, theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a job on all ranks; raises JobFailed with every failing rank's traceback."""
        for pipe in self._pipes:
            pipe.send((function, args))
        replies = self._replies()
        failed = [f"rank {r}:\n{text}" for r, (ok, text) in enumerate(replies) if not ok]
        if failed:
            # The ranks may be out of step; the next job gets new ones.
            self.close(patience=0)
            self._start()
            raise JobFailed("\n".join(failed))
        return [value for _, value in replies]

    def _replies(self) -> list[tuple[bool, Any]]:
        """For each rank, whether it succeeded, and its result or its error as text."""
        replies: list[tuple[bool, Any]] = [(False, "no answer in time")] * self.size
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        end = time.monotonic() + self.seconds
        while waiting and (left := end - time.monotonic()) > 0:
            pipe: Any
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)
                try:
                    replies[rank] = pipe.recv()
                except (EOFError, OSError):
                    replies[rank] = False, "the process died"
                if not replies[rank][0]:
                    end = min(end, time.monotonic() + SECONDS_AFTER_A_FAILURE[self.backend])
        return replies

    def close(self, patience: float = 2) -> None:
        """Stop the processes; each may take ``patience`` seconds to exit by itself."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                with contextlib.suppress(BrokenPipeError):  # it is dying
                    pipe.send(None)
        for process in self._processes:
            process.join(patience)
            process.kill()
        self._folder.cleanup()


def pool_name(backend: str, size: int) -> str:
    return f"{size}{'cpus' if backend == 'gloo' else 'gpus'}"
