"""The ranks of a run: one process group, and agreement that works where a collective may not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from shared.launch import start_ranks

ANSWER = timedelta(seconds=180)  # a rank that compiles kernels answers late


class Lost(RuntimeError):
    """A rank does not answer, so nothing further can be measured."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of something that every rank tried: this rank's value, or why a rank failed."""

    value: Any
    failure: str | None


def from_torchrun(name: str) -> int:
    """A number that torchrun sets: RANK, LOCAL_RANK or WORLD_SIZE. The program ends without it."""
    if name not in os.environ:
        program = sys.argv[0]
        raise SystemExit(f"{program}: start it as torchrun --nproc-per-node 2 {program}")
    return int(os.environ[name])


class Ranks:
    """This rank among the others of the world.

    What ranks tell each other outside of timed runs goes through the store, not through the
    group: after a failure on one rank the group's collectives may be out of step.
    """

    def __init__(self, device: str) -> None:
        self.rank, self.size = from_torchrun("RANK"), from_torchrun("WORLD_SIZE")
        self.cuda = device == "cuda"
        self.device = torch.device(device)
        if self.cuda:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if self.cuda else "gloo",
            device_id=self.device if self.cuda else None,
            timeout=ANSWER,
        )
        assert dist.group.WORLD is not None
        self.group: dist.ProcessGroup = dist.group.WORLD
        self._store = dist.distributed_c10d._get_default_store()
        # Where in a run this rank is: its current attempt, and how often it has gathered there.
        self._scope, self._calls, self._ended = "benchmark/", 0, ""
        self._mark = torch.zeros(1, device=self.device)

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave, by rank; anything that JSON can represent.

        Raises:
            Lost: a rank gave nothing in time, or its attempt failed meanwhile.
        """
        self._calls += 1
        keys = [f"{self._scope}{self._calls}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(value))
        return [json.loads(self._answer(key, rank)) for rank, key in enumerate(keys)]

    def _answer(self, key: str, rank: int) -> bytes:
        end = perf_counter() + ANSWER.total_seconds()
        while not self._store.check([key]):
            if self._ended and self._store.check([f"{self._ended}/{rank}"]):
                if self._store.check([key]):  # it answered between the two checks
                    break
                raise Lost(f"rank {rank} failed")
            if perf_counter() > end:
                raise Lost(f"rank {rank} did not answer in {ANSWER.seconds} s")
            sleep(1e-3)
        return self._store.get(key)

    def of_first(self, value: Any) -> Any:
        """What rank 0 gave, on every rank."""
        return self.gather(value if self.rank == 0 else None)[0]

    def attempt(self, function: Callable[[], Any]) -> Outcome:
        """Call ``function`` on every rank, and wait for the device. It failed if any rank failed.

        If one rank fails midway, other ranks that wait for its answers get an error too.
        """
        outer = self._scope, self._calls + 1, self._ended
        self._scope = f"{outer[0]}{outer[1]}."
        self._calls, self._ended = 0, f"{outer[0]}{outer[1]}"
        value, failure = None, None
        try:
            value = function()
            self.wait()
        except Exception as error:
            failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self._scope, self._calls, self._ended = outer[0], outer[1] - 1, outer[2]
        told = enumerate(self.gather(failure))
        failures = [f"rank {r}: {text}" for r, text in told if text]
        failures.sort(key=lambda text: Lost.__name__ in text)  # the cause first
        if failures and self.cuda:
            with suppress(RuntimeError):  # a broken GPU context, which is reported later
                torch.cuda.empty_cache()
        return Outcome(None, failures[0]) if failures else Outcome(value, None)

    def wait(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def together(self) -> None:
        """Make the ranks start what follows together: on the device's stream, or at once."""
        dist.all_reduce(self._mark, group=self.group)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def launch(run: Callable[..., None], ranks: int | None, *args: Any) -> None:
    """Call ``run(*args)`` as a rank of torchrun; ``ranks`` starts this command again as so many."""
    if ranks:
        start_ranks(ranks)
    if "WORLD_SIZE" not in os.environ:
        sys.exit("start it with torchrun --nproc-per-node N, or say --ranks N")
    run(*args)
