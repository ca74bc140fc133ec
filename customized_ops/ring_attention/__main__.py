"""Plans from the command line (no device, no process group), and what this machine has.

python -m customized_ops.ring_attention plan --mask causal --tokens 1M --ranks 64 --heads 64:8
python -m customized_ops.ring_attention kernels
python -m customized_ops.ring_attention doctor
torchrun --nproc-per-node 2 -m customized_ops.ring_attention doctor
python -m customized_ops.ring_attention fuzz --cases 5000 --seed 1
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch.distributed as dist

from .command_line import plan_command
from .command_line.doctor import doctor
from .command_line.kernel_listing import kernels
from .fuzz import command as fuzz_command


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exits with status 2 and a message where the arguments do not fit."""
    options = _parser().parse_args(arguments)
    try:
        said = options.run(options)
    except (ValueError, OSError, ImportError) as error:
        options.parser.error(str(error))
    if not dist.is_torchelastic_launched() or os.environ["RANK"] == "0":
        print(said)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m customized_ops.ring_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="plan|kernels|doctor|fuzz")
    listing = commands.add_parser("kernels", help="list what kernels this machine has")
    listing.set_defaults(parser=listing, run=lambda options: kernels())
    health = commands.add_parser("doctor", help="say what this machine has, and what to install")
    health.set_defaults(parser=health, run=lambda options: doctor())
    trials = commands.add_parser("fuzz", help="compare random calls over ranks with one device")
    trials.set_defaults(parser=trials, run=fuzz_command.fuzz)
    fuzz_command.add_arguments(trials)
    plan = commands.add_parser(
        "plan",
        help="print what every rank moves and computes",
        usage=f"{parser.prog} plan --ranks P --tokens N [--mask NAME] [options]",
        allow_abbrev=False,
    )
    plan.set_defaults(parser=plan, run=plan_command.plan_report)
    plan_command.add_arguments(plan)
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
