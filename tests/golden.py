"""Hashes of plans and of results, to hold a redesign to: nothing changes, bit for bit.

    python tests/golden.py --write golden.json    records
    python tests/golden.py golden.json            compares, names what differs, exits with 1 if any

Plans: every table of some 500 (mask, layout, ranks, heads). Results: out, lse and gradients of the
cases of ``op_table`` in process, in fp64. Values count, names do not.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("SEQSHARD_CHECK", "0")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support" / "cases")]

import torch  # noqa: E402
from op_cases import run_rank  # noqa: E402
from op_table import TABLE, UNEVEN  # noqa: E402
from torch import Tensor  # noqa: E402
from tqdm import tqdm  # noqa: E402

from customized_ops.ring_attention import AttnMask, Layout, make_plan, run_ranks  # noqa: E402
from customized_ops.ring_attention.core.cost import H200  # noqa: E402

SIZES = (32, 8, 128, 128, 2)


def feed(h: Any, value: Any) -> None:
    """A value into a hash: its contents in order, without names."""
    if isinstance(value, Tensor):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        h.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, bool | int | float | str | bytes | np.generic) or value is None:
        h.update(f"{value!r};".encode())
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            feed(h, getattr(value, field.name))
    elif isinstance(value, tuple | list):
        h.update(f"[{len(value)}".encode())
        for each in value:
            feed(h, each)
    elif isinstance(value, dict):
        feed(h, sorted(value.items()))
    else:
        raise TypeError(f"no hash of a {type(value).__name__}")


def digest(*values: Any) -> str:
    """16 hex digits."""
    h = hashlib.sha256()
    for value in values:
        feed(h, value)
    return h.hexdigest()[:16]


def masks(total: int) -> dict[str, AttnMask]:
    """Masks over so many tokens."""
    rng = np.random.default_rng(total)
    cuts = np.sort(rng.integers(0, total + 1, 9))
    cu = [0, *cuts.tolist(), total]
    return {
        "causal": AttnMask.causal(total),
        "full": AttnMask.full(total),
        "window": AttnMask.varlen([0, total], [0, total], causal=True, window=(total // 7, -1)),
        "packed": AttnMask.varlen(cu, cu, causal=True),
        "packed full": AttnMask.varlen(cu, cu, causal=False),
        "prefix": AttnMask.prefix_lm(total, total // 5),
        "streaming": AttnMask.streaming(total, total // 9, 3),
        "blocks": AttnMask.block_causal(total, max(total // 6, 1)),
    }


def layouts(mask: AttnMask, ranks: int) -> dict[str, Layout]:
    """Layouts of such a mask's tokens."""
    total = mask.q_len
    rng = np.random.default_rng(total * ranks)
    cuts = np.sort(rng.integers(0, total + 1, ranks - 1))
    return {
        "contiguous": Layout.contiguous(total, ranks),
        "zigzag": Layout.zigzag(total, ranks),
        "uneven": Layout.from_sizes(np.diff([0, *cuts.tolist(), total]).tolist()),
        "balanced": Layout.balanced(mask, ranks),
    }


def plans() -> Iterator[tuple[str, Any]]:
    """Name and what makes a hash, of every plan."""
    for total, ranks in ((96, 1), (97, 2), (512, 3), (2048, 4), (1000, 5), (4096, 8), (2050, 16)):
        for mask_name, mask in masks(total).items():
            for layout_name, layout in layouts(mask, ranks).items():
                yield (
                    f"layout {mask_name} {layout_name} {total} {ranks}",
                    lambda a=layout: (a.table,),
                )
                ways: list[dict[str, Any]] = [{}, {"heads": (16, 16)}, {"team_size": None}]
                if layout_name == "contiguous":
                    ways += [{"assignment": "owner"}, {"assignment": "zigzag"}, {"stages": 0}]
                for way in ways:
                    name = f"{mask_name} {layout_name} {total} {ranks} {way}"
                    yield name, lambda m=mask, a=layout, w=way: plan_values(m, a, w)


def plan_values(mask: AttnMask, layout: Layout, way: dict[str, Any]) -> tuple[Any, ...]:
    """Every table of a plan."""
    plan = make_plan(mask, layout, **way)
    sizes = (*way.get("heads", SIZES[:2]), *SIZES[2:])
    passes = H200.passes(plan, *sizes)
    return (
        plan.work,
        plan.team_size,
        plan.n_stages,
        plan.head_groups,
        plan.q_needed,
        plan.kv_needed,
        plan.q_tokens(),
        plan.kv_tokens(),
        plan.traffic(),
        plan.area,
        plan.calls(sizes[1]),
        plan.forward_bytes(*sizes),
        plan.backward_bytes(*sizes),
        [plan.rank(r) for r in range(plan.group_size)],
        [each.seconds for each in passes],
        plan.imbalance(*sizes[:2]),
    )


def results() -> Iterator[tuple[str, Any]]:
    """Name and what makes a hash, of every call."""
    for name, case in TABLE.items():
        for ranks in (1, 2, 3):
            yield f"call {name} {ranks}", lambda c=case, n=ranks: run(c, n)
    for ranks, cases in UNEVEN.items():
        for name, case in cases.items():
            yield f"call {name} {ranks}", lambda c=case, n=ranks: run(c, n)


def run(case: Any, ranks: int) -> Any:
    """Results of every rank."""
    torch.manual_seed(0)
    return run_ranks(ranks, lambda comm: run_rank(case, comm.rank, ranks, comm))


def main() -> None:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [case for case in (*plans(), *results()) if given.only in case[0]]
    found = {name: digest(*make()) for name, make in tqdm(cases)}
    if given.write:
        given.file.write_text(json.dumps(found, indent=0) + "\n")
        return
    wanted = json.loads(given.file.read_text())
    differ = [name for name, value in found.items() if wanted.get(name) != value]
    print(f"{len(found)} cases, {len(differ)} differ", *differ, sep="\n  ")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
