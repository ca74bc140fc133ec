"""Test set-up: rank pools, checks on, what to skip where."""

from __future__ import annotations

import gc
import heapq
import importlib.util
import itertools
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

# Before anything reads it, and inherited by the processes of the pools.
os.environ["SEQSHARD_CHECK"] = "1"
# What flash-attn-4 compiles is shared by all processes of this run, and by no other run: the
# library does not see every change of this package's mask functions.
if "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory()
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = compiled.name
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"

import pytest

if TYPE_CHECKING:  # the process that hands out tests needs neither, and starts before the others
    from ranks import Pool

    from customized_ops.ring_attention import Layout

# Less often: graphs and plans are many small objects that live long.
gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, saying so, what this machine cannot run; leave for later most cases of
    tests that say so."""
    fewer: dict[str, list[pytest.Item]] = {}
    marks_of = [{mark.name for mark in item.iter_markers()} for item in items]
    for item, marks in zip(items, marks_of, strict=True):
        if marks & {"thin", "covering"} and not marks & {"gpu", "slow"}:
            fewer.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for function, cases in fewer.items():
        draw = random.Random(function)  # by no pattern, and the same in every process
        cases = draw.sample(cases, len(cases))
        if (mark := cases[0].get_closest_marker("thin")) is not None:
            kept = cases[: -(-len(cases) // mark.args[0])]
        else:
            kept = covering(cases, *cases[0].get_closest_marker("covering").args)  # type: ignore[union-attr]
        for case in set(cases) - set(kept):
            case.add_marker(pytest.mark.slow)
    import torch

    missing = {
        "gpu": not torch.cuda.is_available(),
        "nnscaler": importlib.util.find_spec("nnscaler") is None,
    }
    reasons = {"gpu": "needs a CUDA device", "nnscaler": "needs nnscaler installed"}
    for item, marks in zip(items, marks_of, strict=True):
        for name in marks & set(missing):
            if missing[name]:
                item.add_marker(pytest.mark.skip(reason=reasons[name]))


def covering(cases: list[pytest.Item], together: int = 1) -> list[pytest.Item]:
    """Nearly as few cases as can have, between them, each value of each parameter, or of
    ``together`` parameters each combination of values."""
    has = []
    for case in cases:
        values = sorted((name, id(value)) for name, value in case.callspec.params.items())  # type: ignore[attr-defined]
        has.append(set(itertools.combinations(values, together)))
    kept: list[pytest.Item] = []
    missing = set().union(*has)
    # The first of those that add most; what a case adds only falls, so few are looked at again.
    adds = [(-len(each), n) for n, each in enumerate(has)]
    heapq.heapify(adds)
    while missing:
        known, n = adds[0]
        if -len(has[n] & missing) == known:
            kept.append(cases[n])
            missing -= has[n]
        heapq.heapreplace(adds, (-len(has[n] & missing), n))
    return kept


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no collection of garbage has to look through them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks as threads or processes must not each start a thread per core."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def ranks_as_threads_on_one_core() -> Iterator[None]:
    """Of Python only one thread runs at a time: over several cores half of the time goes to handing
    the interpreter over. Processes, and threads of others, stay free."""
    from customized_ops.ring_attention.core.comm.inprocess import InProcessComm

    if not hasattr(os, "sched_setaffinity"):  # not on Linux
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    core, start = cores[worker % len(cores)], InProcessComm.__init__

    def on_one_core(comm: InProcessComm, *given: Any) -> None:  # called in the rank's thread
        os.sched_setaffinity(0, {core})
        start(comm, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessComm, "__init__", on_one_core)
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test draws the same tensors whichever tests its process ran before: which these are depends
    on how busy the machine is."""
    import torch

    # torch.manual_seed also notes, with a traceback, seeds for each kind of device that is missing.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks do not compare their calls, so none has to look into one that it has met before."""
    monkeypatch.setenv("SEQSHARD_CHECK", "0")


@pytest.fixture
def balanced_once(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Layout]:
    """``Layout.balanced`` by what it is asked for: ranks that are threads wait for the first one to
    make it. All at the same time they would slow each other down."""
    from customized_ops.ring_attention import Layout

    known: dict[Any, Layout] = {}
    lock, make = threading.Lock(), Layout.balanced

    def once(*args: Any, **told: Any) -> Layout:
        key = args, tuple(sorted(told.items()))
        with lock:
            if key not in known:
                known[key] = make(*args, **told)
        return known[key]

    monkeypatch.setattr(Layout, "balanced", once)
    return known


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[str, int], Pool]]:
    """From backend and size to a pool, each started once."""
    from ranks import Pool

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
    import torch

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
