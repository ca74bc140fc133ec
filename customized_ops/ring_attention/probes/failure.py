"""What a step of a model ended with on one rank: what was raised, and where in the user's code."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import NamedTuple

from ..core.comm.patience import PeerFailed

# What a user's code calls.
NOT_THEIRS = {"annotations", "customized_ops", "torch", *sys.stdlib_module_names}


class Failure(NamedTuple):
    """An error of one rank.

    Attributes:
        text: type and message.
        where: the innermost line of the user's code that it went through; may be empty.
        follows: whether the rank only waited for a peer that failed, or was lost.
    """

    text: str
    where: str
    follows: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Of what a step raised."""
        text = f"{type(error).__name__}: {error}"
        return cls(text, _where(error), isinstance(error, PeerFailed))

    def of_rank(self, rank: int) -> str:
        """As it is told of."""
        return f"rank {rank}{self.where}: {self.text}"


def _where(error: Exception) -> str:
    frames = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in NOT_THEIRS
    ]
    if not frames:
        return ""
    code, line = frames[-1]
    return f", in {code.co_name} ({Path(code.co_filename).name}, line {line})"
