"""What slow work is doing: a line or a bar on stderr, cleared when the work is done.

Nothing is shown if stderr is no terminal, on ranks other than the first, or in the first second.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from tqdm import tqdm

T = TypeVar("T")

DELAY = 1.0  # seconds before anything is shown, and between two updates of a stage's seconds


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Say that ``what`` is being done, and for how long already."""
    with tqdm(desc=what, bar_format="{desc}: {elapsed}", miniters=0, **_options()) as line:
        done = threading.Event()

        def tick() -> None:
            while not done.wait(DELAY):
                line.update(0)

        ticking = threading.Thread(target=tick, daemon=True)
        if not line.disable:
            ticking.start()
        try:
            yield
        finally:
            done.set()
            if not line.disable:
                ticking.join()


def counted(items: Collection[T], what: str) -> Iterator[T]:
    """Yield ``items``, and show how many of them are done."""
    yield from tqdm(items, desc=what, **_options())


def _options() -> dict[str, Any]:
    first = not dist.is_initialized() or dist.get_rank() == 0
    # tqdm hides a bar with disable=None where its stream is no terminal.
    return {"disable": None if first else True, "delay": DELAY, "leave": False}
