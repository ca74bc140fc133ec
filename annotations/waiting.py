"""How long a rank waits for its peers before it says so, and how it says it."""

from __future__ import annotations

import os
import sys
import warnings

PATIENCE = "SEQSHARD_PATIENCE"  # the environment variable; in seconds
PATIENCE_SECONDS = 30.0  # a longer wait is reported


def patience() -> float:
    """Seconds after which a wait is reported.

    Raises:
        ValueError: ``SEQSHARD_PATIENCE`` is not a number.
    """
    given = os.environ.get(PATIENCE, PATIENCE_SECONDS)
    try:
        return float(given)
    except ValueError:
        raise ValueError(f"{PATIENCE} must be a number of seconds, got {given!r}") from None


def tell(text: str) -> None:
    """Warn, or print if warnings are errors: the thread that watches a wait must go on."""
    try:
        warnings.warn(text, stacklevel=3)
    except UserWarning:
        print(text, file=sys.stderr)
