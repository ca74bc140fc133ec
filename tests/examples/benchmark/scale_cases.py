"""An account of a run, with what is left out filled in."""

from __future__ import annotations

from typing import Any

from benchmark.measure.account import Account


def account(**given: Any) -> Account:
    rest = dict.fromkeys(["least", "received_all", "least_all", "pairs", "least_pairs"], 1)
    named = {"forward": 1.0, "backward": 2.0, "received": [30, 40], "imbalance": 1.0, **rest}
    return Account(**{**named, **given})
