"""``examples/nnscaler_llama.py`` on the ranks of a pool."""

from __future__ import annotations

from collections.abc import Sequence

import example_jobs

from .jobs import world


def run(arguments: Sequence[str]) -> tuple[int, str]:
    """What its ``main`` returns and prints, on GPUs or on stand-ins for them."""
    with world():
        return example_jobs.run("nnscaler_llama", arguments)
