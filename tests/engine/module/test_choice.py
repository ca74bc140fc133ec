"""Which engine a call is for."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any
from unittest import TestCase

import pytest
import torch

from annotations import ComputeConfig, parallel, parallelize
from annotations.engines.torch.rates import Link

MISSING = (
    ", and nnscaler 0.9 is not installed: install it from "
    "https://github.com/msrasys/nnscaler, or use engine='torch'"
)
ASKS_NOTHING = "the call asks for nothing that only nnscaler has"


def policy(*_: Any) -> None: ...


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    ("pas", "config", "options", "chosen", "why"),
    [
        ("cp", {}, {}, "torch", ASKS_NOTHING),
        (policy, {}, {}, "torch", ASKS_NOTHING),
        ("cp", {"reducer_bucket_cap_mb": 9.0}, {"reuse": "match"}, "torch", ASKS_NOTHING),
        ("cp", {"trace_strategy": "cpu"}, {"module_dtype": torch.float64}, "torch", ASKS_NOTHING),
        ("cp", {"use_async_reducer": True, "use_end2end": True}, {}, "torch", ASKS_NOTHING),
        ("autodist", {}, {}, "nnscaler", "the policy 'autodist' is nnscaler's"),
        ("cp", {"use_zero": 1}, {}, "nnscaler", "only nnscaler has use_zero of ComputeConfig"),
        (
            "cp",
            {"pas_config": {"max_partition_degree": 2}},
            {},
            "nnscaler",
            "pas_config['max_partition_degree'] is not among the embedded engine's keys, "
            "mesh_shape, memory_bytes, optimizer_bytes_per_parameter, rates, hoist",
        ),
        ("cp", {}, {"gen_savedir": "x"}, "nnscaler", "only nnscaler has the argument gen_savedir"),
    ],
)
def test_auto(
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
    pas: Any,
    config: dict[str, Any],
    options: dict[str, Any],
    chosen: str,
    why: str,
) -> None:
    """What is installed changes nothing but whether nnscaler can be had."""
    from annotations.engines import torch as embedded

    monkeypatch.setattr(parallel, "_installed", lambda: installed)
    monkeypatch.setattr(embedded, "parallelize", lambda *args, **kwargs: "torch")
    if chosen == "nnscaler" and installed:
        pytest.importorskip("nnscaler", reason="nnscaler is not installed: see CONTRIBUTING.md")
        from annotations.engines import nnscaler

        monkeypatch.setattr(nnscaler, "parallelize", lambda *args, **kwargs: "nnscaler")
    given = torch.nn.Linear(3, 3), {}, pas, ComputeConfig(2, 2, **config)
    with TestCase().assertLogs(parallel.__name__, logging.INFO) as logged:
        if chosen == "nnscaler" and not installed:
            with pytest.raises(ModuleNotFoundError) as raised:
                parallelize(*given, **options)
            said = f"parallelize: {why}{MISSING}"
            assert str(raised.value) == said
        else:
            assert parallelize(*given, **options) == chosen
    said = [record.getMessage() for record in logged.records]
    assert said == [f"parallelize: engine {chosen}, because {why}"]


@pytest.mark.parametrize(
    ("key", "near"),
    [("memory_byte", "memory_bytes"), ("hoists", "hoist"), ("mesh-shape", "mesh_shape")],
)
def test_a_misspelt_key_is_no_engine(key: str, near: str) -> None:
    config = ComputeConfig(2, 2, pas_config={key: 1})
    with pytest.raises(ValueError, match=f"has no key '{key}'; did you mean '{near}'"):
        parallelize(torch.nn.Linear(3, 3), {}, "cp", config)


def test_nnscaler_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as raised:
        parallelize(torch.nn.Linear(3, 3), {}, "cp", ComputeConfig(2, 2), engine="nnscaler")
    said = f"parallelize: engine='nnscaler' is asked for{MISSING}"
    assert str(raised.value) == said


def test_an_unknown_engine() -> None:
    with pytest.raises(ValueError) as raised:
        parallelize(torch.nn.Linear(3, 3), {}, "cp", ComputeConfig(2, 2), engine="jax")
    said = "parallelize: engine must be one of auto, nnscaler, torch, got 'jax'"
    assert str(raised.value) == said


@pytest.mark.parametrize("given", [2, ComputeConfig, Link(1.0)])
def test_what_is_no_config(given: Any) -> None:
    with pytest.raises(TypeError) as raised:
        parallelize(torch.nn.Linear(3, 3), {}, "cp", given)
    said = "parallelize: compute_config must be a ComputeConfig, this package's or nnscaler's, got "
    assert str(raised.value) == f"{said}{given!r}"


@pytest.mark.parametrize("verify", ["no", None, 1])
def test_what_is_no_verify(verify: Any) -> None:
    with pytest.raises(TypeError, match="verify must be True, False, or a mapping"):
        parallelize(torch.nn.Linear(3, 3), {}, "cp", ComputeConfig(1, 1), verify=verify)
