"""How a step of a model failed on one rank: what was raised, and where in the user's code."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import NamedTuple

from ..core.comm.patience import PeerFailed

# Packages whose frames are not the user's own code.
NOT_THEIRS = {"annotations", "customized_ops", "torch", *sys.stdlib_module_names}


class Failure(NamedTuple):
    """An error of one rank.

    Attributes:
        text: type and message.
        where: the innermost line of the user's code in the traceback; may be empty.
        follows: whether the rank only waited for a peer that failed or was lost.
    """

    text: str
    where: str
    follows: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The failure of a step that raised ``error``."""
        text = f"{type(error).__name__}: {error}"
        return cls(text, _where(error), isinstance(error, PeerFailed))

    def of_rank(self, rank: int) -> str:
        """The failure as a message about one rank."""
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
