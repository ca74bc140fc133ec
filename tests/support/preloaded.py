"""What ranks of tests have imported when they are forked; see ``ranks.Pool``. The process that
forks them begins with the root of the repository as its path, and no other folder."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

sys.path += [str(path) for path in Path(__file__).parent.iterdir() if path.is_dir()]
with contextlib.suppress(ImportError):  # transformers is optional
    import hf_models  # noqa: F401

# As in conftest.py: what is traced is many small objects that live long.
gc.set_threshold(20_000, 20, 20)

Gloo = distributed_c10d.ProcessGroupGloo


class GlooOfOneDevice(Gloo):
    """All groups of a rank share a device of gloo. Each device has a thread that wakes a hundred
    times a second; with one for each group that any test made, a rank came to have 21."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        options = Gloo._Options()
        options._timeout, options._devices = timeout, [_device()]
        super().__init__(store, rank, size, options)


@functools.cache
def _device() -> Any:
    return Gloo.create_default_device()


distributed_c10d.ProcessGroupGloo = GlooOfOneDevice
