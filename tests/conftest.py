"""Test set-up: rank pools, checks on, what to skip where."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import tempfile
from collections.abc import Callable, Iterator

# Before anything reads it, and inherited by the processes of the pools.
os.environ["SEQSHARD_CHECK"] = "1"
# What flash-attn-4 compiles is shared by all processes of this run, and by no other run: the
# library does not see every change of this package's mask functions.
if "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory()
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = compiled.name
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"

import pytest
import torch
from ranks import Pool


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, saying so, what this machine cannot run; leave most cases of thin tests for later."""
    thin: dict[str, list[pytest.Item]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "thin" in marks and not marks & {"gpu", "slow"}:
            thin.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for function, cases in thin.items():
        (every,) = cases[0].get_closest_marker("thin").args  # type: ignore[union-attr]
        draw = random.Random(function)  # by no pattern, and the same in every process
        for case in draw.sample(cases, len(cases) - -(-len(cases) // every)):
            case.add_marker(pytest.mark.slow)
    missing = {
        "gpu": not torch.cuda.is_available(),
        "nnscaler": importlib.util.find_spec("nnscaler") is None,
    }
    reasons = {"gpu": "needs a CUDA device", "nnscaler": "needs nnscaler installed"}
    for item in items:
        for name in missing:
            if item.get_closest_marker(name) and missing[name]:
                item.add_marker(pytest.mark.skip(reason=reasons[name]))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no collection of garbage has to look through them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks as threads or processes must not each start a thread per core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test draws the same tensors whichever tests its process ran before: which these are depends
    on how busy the machine is."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[str, int], Pool]]:
    """From backend and size to a pool, each started once."""
    started: dict[tuple[str, int], Pool] = {}

    def pool(backend: str, size: int) -> Pool:
        if (backend, size) not in started:
            started[backend, size] = Pool(size, backend)
        return started[backend, size]

    yield pool
    for each in started.values():
        each.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest, pools: Callable[[str, int], Pool]) -> Pool:
    """One of the pools that :func:`ranks.worlds` names."""
    backend, size = request.param
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, found {torch.cuda.device_count()}")
    return pools(backend, size)


@pytest.fixture(scope="session")
def two_ranks(pools: Callable[[str, int], Pool]) -> Pool:
    """Two gloo processes."""
    return pools("gloo", 2)


@pytest.fixture(scope="session")
def four_ranks(pools: Callable[[str, int], Pool]) -> Pool:
    """Four gloo processes."""
    return pools("gloo", 4)
