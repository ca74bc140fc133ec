"""Where the time of one run goes, from a torch.profiler trace.

attention    a kernel of attention runs
other        another kernel: merging, adding, copying by the cores
copies       the copy engine, or NCCL; exposed: while no kernel computes
idle         nothing runs on the device, from its first kernel to its last
host         from the first call to the last, by the host's clock
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from time import perf_counter
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from benchmark.compete.match import OURS, Match
from benchmark.measure.timing import Marks

ATTENTION = re.compile(r"flash|fmha|attention|attn|sdpa|cudnn_generated", re.IGNORECASE)
NCCL = re.compile(r"nccl", re.IGNORECASE)

STEP = "benchmark step"

Spans = list[tuple[float, float]]


def profile_case(match: Match, folder: Path) -> tuple[str, dict[str, Any]]:
    """Trace one run of each op of this package that is ready; one file per rank.

    Returns: text to read; and for each op and rank, ms by name, and kernels launched.
    """
    texts, figures = [], {}
    for name, runner in match.runners.items():
        if not name.startswith(OURS):
            continue
        title = f"{match.case.name} {match.case.tokens} {name}"
        outcome = match.ranks.attempt(lambda t=title, r=runner: _traced(match, t, r, folder))
        if outcome.failure:
            texts.append(f"trace of {name}: failed: {outcome.failure}")
            continue
        figures[name] = match.ranks.gather(outcome.value)
        for rank, ms in enumerate(figures[name]):
            shown = ", ".join(
                f"{n} {value:.3f}" if isinstance(value, float) else f"{n} {value}"
                for n, value in ms.items()
            )
            texts.append(f"trace of {name}, rank {rank}, ms: {shown}")
    return "\n".join(texts), figures


def _traced(match: Match, title: str, runner: Any, folder: Path) -> dict[str, float]:
    ranks = match.ranks
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * ranks.cuda
    ranks.wait()
    with profile(activities=activities) as traced:
        for name in ("warm up", STEP):
            ranks.together()
            ranks.wait()
            with record_function(name):
                began = perf_counter()
                runner.step(Marks(ranks.cuda))
                host = 1e3 * (perf_counter() - began)
            ranks.wait()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub('[^a-zA-Z0-9]+', '_', title)}.rank{ranks.rank}.json"
    traced.export_chrome_trace(str(path))
    return {**summarize(json.loads(path.read_text())["traceEvents"]), "host": host}


def summarize(events: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds by what the device did, from the events of a Chrome trace, from the start of
    STEP on."""
    spans: dict[str, Spans] = {"attention": [], "other": [], "copies": []}
    began = min((float(e["ts"]) for e in events if e.get("name") == STEP), default=0.0)
    for event in events:
        category = event.get("cat")
        if event.get("ph") != "X" or category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name, start = event["name"], float(event["ts"])
        if start < began:
            continue
        kind = "other"
        if category == "gpu_memcpy" or NCCL.search(name):
            kind = "copies"
        elif ATTENTION.search(name):
            kind = "attention"
        spans[kind].append((start, start + float(event["dur"])))
    computing = spans["attention"] + spans["other"]
    busy = computing + spans["copies"]
    whole = max((b for _, b in busy), default=0.0) - min((a for a, _ in busy), default=0.0)
    found = {kind: covered(each) / 1e3 for kind, each in spans.items()}
    found["exposed copies"] = (covered(busy) - covered(computing)) / 1e3
    found["idle"] = (whole - covered(busy)) / 1e3
    found["device"] = whole / 1e3
    found["kernels"] = len(busy)
    return found


def covered(spans: Spans) -> float:
    """Length of the union of spans."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total
