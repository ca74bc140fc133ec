"""Commands of the embedded engine.

torchrun --nproc-per-node 4 -m annotations.engines.torch calibrate --mesh 2 2
python -m annotations.engines.torch plan my_model:example --mesh 8 8 --memory 80e9
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..config import ComputeConfig
from .plan.dry_run import plan_without_ranks
from .plan.meshes import axis_names, mesh_of_copies
from .rates import calibrate, rates_file


def measure(arguments: argparse.Namespace) -> None:
    """Measure the speeds of this machine, on every rank of a run under torchrun, and save them."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    shape = tuple(arguments.mesh or [dist.get_world_size()])
    copies = dist.get_world_size() // math.prod(shape)
    if copies * math.prod(shape) != dist.get_world_size():
        raise SystemExit(f"--mesh {shape}: the {dist.get_world_size()} ranks are no multiple of it")
    mesh = mesh_of_copies("cuda" if cuda else "cpu", copies, shape)[axis_names(shape)]
    rates = calibrate(mesh, copies)
    if dist.get_rank() == 0:
        print(rates)
        print(f"kept in {rates_file(mesh, copies)}")
    dist.destroy_process_group()


def plan(arguments: argparse.Namespace) -> None:
    """Print the plan of a model, made in one process."""
    model, example = _model(arguments.model)
    settings: dict[str, object] = {"mesh_shape": tuple(arguments.mesh)}
    if arguments.memory:
        settings["memory_bytes"] = arguments.memory
    ranks = math.prod(arguments.mesh)
    config = ComputeConfig(ranks, ranks * arguments.copies, pas_config=settings)
    found = plan_without_ranks(model, example, arguments.policy, config)
    print(found)
    if arguments.json:
        Path(arguments.json).write_text(found.to_json())


def _model(path: str) -> tuple[torch.nn.Module, Mapping[str, Any]]:
    """What ``module:function`` returns."""
    module, _, name = path.partition(":")
    made = getattr(importlib.import_module(module), name)()
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module):
        return made
    raise SystemExit(
        f"plan: {path} must return a module and example arguments of its forward by name, e.g. "
        f"(model, {{'tokens': tokens}}), but returned {type(made).__name__}"
    )


def main() -> None:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(prog="python -m annotations.engines.torch")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("calibrate", help="measure this machine, under torchrun")
    one.add_argument("--mesh", type=int, nargs="+", help="ranks of a copy; by default all")
    one.set_defaults(run=measure)
    two = commands.add_parser("plan", help="plan a model without ranks")
    two.add_argument("model", help="module:function that returns a model and example arguments")
    two.add_argument("--mesh", type=int, nargs="+", required=True, help="ranks of a copy")
    two.add_argument("--copies", type=int, default=1)
    two.add_argument("--policy", default="auto")
    two.add_argument("--memory", type=float, help="bytes that a rank may hold")
    two.add_argument("--json", help="also write the plan to this file")
    two.set_defaults(run=plan)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
