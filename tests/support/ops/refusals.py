"""What ranks say to calls that they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from customized_ops.ring_attention import run_ranks
from customized_ops.ring_attention.core.comm import Comm


def refusals(
    ranks: int,
    call: Callable[[Comm], object],
    kind: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> list[str]:
    """What each in-process rank says to a call that all refuse before anything is sent."""

    def of_rank(comm: Comm) -> str:
        comm.start = None  # type: ignore[assignment]  # nothing may be sent
        with pytest.raises(kind) as caught:
            call(comm)
        return str(caught.value)

    return run_ranks(ranks, of_rank)
