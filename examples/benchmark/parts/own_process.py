"""Work in a process of its own: a crash or hang there does not cost any other results.

worker = Worker(Rows, "flash4")     the process makes Rows("flash4")
worker.ask(3, 60)                   ... and calls it with 3; at most 60 s
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any


class Lost(Exception):
    """The process is gone; the message says why."""


class Worker:
    """One process, which is started at once and answers questions until it is closed. It may start
    processes itself, as compilers do. What it prints goes to stderr."""

    def __init__(self, factory: Callable[..., Callable[[Any], Any]], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(factory, args, theirs))
        self._process.start()
        theirs.close()  # so that the pipe closes when the process ends
        self._why = ""

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer to a question. The first one also waits for the process to start.

        Raises:
            Lost: the process raised, died or took longer than ``seconds``, now or earlier.
        """
        if not self._why:
            try:
                self._pipe.send(question)
                if self._pipe.poll(seconds):
                    fine, answer = self._pipe.recv()
                    if fine:
                        return answer
                    self._why = answer
                else:
                    self._why = f"no answer in {seconds:.0f} s"
            except (EOFError, OSError):
                self._process.join(5)
                self._why = f"its process died, exit code {self._process.exitcode}"
            self.close()
        raise Lost(self._why)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join(5)


def _serve(factory: Callable[..., Callable[[Any], Any]], args: tuple[Any, ...], pipe: Any) -> None:
    os.dup2(2, 1)
    try:
        answer = factory(*args)
        while True:
            pipe.send((True, answer(pipe.recv())))
    except EOFError:
        return
    except BaseException as error:
        pipe.send((False, f"{type(error).__name__}: {str(error)[:200]}"))
