"""Real ranks for tests: P processes over gloo or NCCL, started once and given jobs.

    pool.run(function, *args)   ->   [function(*args) on rank 0, on rank 1, ...]

``function`` must be importable in a fresh process, so jobs live in modules of this folder, not in
test files. Starting P interpreters costs seconds; a job costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

JOB_SECONDS = 60


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
        timeout=timedelta(seconds=seconds / 4),
    )
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

    A job may take ``seconds``; a rank waits for another for a quarter of that.
    """

    def __init__(self, size: int, backend: str = "gloo", seconds: float = JOB_SECONDS) -> None:
        self.size, self.backend, self.seconds = size, backend, seconds
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
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
        replies = [self._reply(rank) for rank in range(self.size)]
        failed = [f"rank {r}:\n{text}" for r, (ok, text) in enumerate(replies) if not ok]
        if failed:
            # Its world may be out of step; the next job gets a new one.
            self.close()
            self._start()
            raise JobFailed("\n".join(failed))
        return [value for _, value in replies]

    def _reply(self, rank: int) -> tuple[bool, Any]:
        if not self._pipes[rank].poll(self.seconds):
            return False, f"no answer in {self.seconds} s"
        try:
            return self._pipes[rank].recv()
        except EOFError:
            return False, "the process died"

    def close(self) -> None:
        """Stop the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(2)
            process.kill()
        self._folder.cleanup()
