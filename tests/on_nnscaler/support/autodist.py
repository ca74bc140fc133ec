"""nnscaler's planner, "autodist": its settings on a machine of tests, and what it chose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml


def settings(folder: Path, **further: Any) -> dict[str, Any]:
    """The ComputeConfig's ``pas_config``: profiles and plan go to a folder, not to the home.

    ``parallel_profile`` off profiles in rank 0 itself, which as a process of a pool may start none.
    """
    return {
        "profile_dir": str(folder / "profile"),
        "save_plan_path": str(folder / "plan.json"),
        "parallel_profile": False,
        "mem_constraint": 4,  # GiB a device
        **further,
    }


def constraints(folder: Path, *rules: dict[str, Any]) -> str:
    """Write partition constraints; ``allowed`` are (input, dim), of which none means replicated.

    nnscaler 0.9 needs all four fields, and drops the whole file with no more than a line in the log
    if one is missing.
    """
    fields = [
        {
            "name": rule["op"],
            "parent_module": rule.get("module", ""),
            "allowed_partition_dims": [f"{index},{dim}" for index, dim in rule["allowed"]],
            "replica_allowed": not rule["allowed"],
        }
        for rule in rules
    ]
    path = folder / "constraints.yaml"
    path.write_text(yaml.safe_dump(fields))
    return str(path)


def chosen_plan(folder: Path) -> list[tuple[str, str, tuple[int, int] | None]]:
    """The plan it saved: (name of the module, op, the (input, dim) it is cut on or None)."""
    plan = json.loads((folder / "plan.json").read_text())["desc"]["spmd_descs"]
    chosen = []
    for op in (op for stage in plan for op in stage["partition_descs"]):
        [[index, dim], _] = op["partition"][0]
        chosen.append((op["fqn"], op["op"], None if index < 0 else (index, dim)))
    return chosen
