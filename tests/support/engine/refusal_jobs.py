"""Jobs that are refused, by one rank or by all; see ``ranks.Pool``."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_jobs import Plain, sample, tiny_llama
from steps import refusal
from torch import nn

from annotations import ComputeConfig, parallelize
from annotations.engines.torch.plan.rank_agreement import compare
from annotations.waiting import PATIENCE


def late(seconds: float, patience: str) -> list[str]:
    """What rank 0 is told where the other rank comes so many seconds late to what ranks compare."""
    with mock.patch.dict(os.environ, **{PATIENCE: patience}):
        if dist.get_rank():
            time.sleep(seconds)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            compare("batches", {"x": "the same"})
        return [str(each.message) for each in told]


def refused(what: str) -> str:
    """The error of parallelizing something that cannot be, as this rank gets it."""
    policy: Any = "cp"
    module: nn.Module = Plain(what)
    given = {"x": torch.zeros(2, 8, 8)}
    config = ComputeConfig(2, 2)
    options: dict[str, Any] = {}
    match what:
        case "unknown policy":
            policy = "diagonal"
        case "wrong split":
            policy = lambda ops, config: {ops[0].name: "hd"}  # noqa: E731
        case "unknown op":
            policy = lambda ops, config: {"attn": "l"}  # noqa: E731
        case "too few to split":
            policy = lambda ops, config: {ops[0].name: "b"}  # noqa: E731
            given = {"x": torch.zeros(1, 8, 8)}
        case "batch of one":
            policy, given = "dp", {"x": torch.zeros(1, 8, 8)}
        case "packed dp":
            policy, module, given = "dp", tiny_llama("varlen"), sample("varlen", 1, 16)
        case "wrong ranks":
            config = ComputeConfig(3, 3)
        case "wrong arguments":
            given = {"y": torch.zeros(1)}
        case "examples of their own":
            given = {"x": torch.zeros(2, 8 + 2 * dist.get_rank(), 8)}
        case "configs of their own":
            config = ComputeConfig(2 - dist.get_rank(), 2)
        case "policies of their own":
            policy = ["cp", "dp"][dist.get_rank()]
        case "hoists of their own":
            config = ComputeConfig(2, 2, pas_config={"hoist": dist.get_rank() == 1})
        case "modules of their own":
            module, given = nn.Linear(8, 8, bias=dist.get_rank() == 0), {"input": given["x"]}
        case "unknown policy of rank 1":
            policy = ["cp", "diagonal"][dist.get_rank()]
        case "one rank":
            config = ComputeConfig(1, 1)
        case "no data on rank 1":
            with torch.device(["cpu", "meta"][dist.get_rank()]):
                module, given = nn.Linear(8, 8, bias=False), {"input": given["x"]}
        case "dtypes of their own" | "dtypes of their own, made one":
            module = Plain("fine").to([torch.float64, torch.float32][dist.get_rank()])
            if what.endswith("one"):
                options["module_dtype"] = torch.float32
        case "verified by rank 1":
            options["verify"] = dist.get_rank() == 1
    if dist.get_rank() == 1:  # what the other cannot know of
        match what:
            case "field of rank 1":
                config = ComputeConfig(2, 2, use_zero=1)
            case "option of rank 1":
                options["lowered"], options["compile"] = False, True
            case "class of rank 1":
                module = Plain  # type: ignore[assignment]
            case "list of rank 1":
                given = [given["x"]]  # type: ignore[assignment]
            case "name of rank 1":
                given = {"z": given["x"]}
            case "verify of rank 1":
                options["verify"] = {"z": given["x"]}
            case "dtype of rank 1":
                options["module_dtype"] = "bf16"
            case "lazy parameter of rank 1":
                module, given = nn.LazyLinear(8), {"input": given["x"]}
            case "mesh of rank 1":
                config = ComputeConfig(2, 2, pas_config={"mesh_shape": (3,)})
    return refusal(parallelize, module, given, policy, config, engine="torch", **options)


def batches_of_their_own(said: bool) -> str:
    """What ranks of one copy say to batches that differ, where comparing calls was asked for
    (``said``) or nothing was said."""
    parallel = parallelize(Plain("fine"), {"x": torch.zeros(2, 8, 8)}, "cp", ComputeConfig(2, 2))
    with mock.patch.dict(os.environ):
        if not said:
            del os.environ["SEQSHARD_CHECK"]
        return refusal(parallel, torch.full((2, 8, 8), float(dist.get_rank())))


def called_wrongly() -> list[str]:
    """What a parallel module says to inputs it was not made for."""
    given = {"x": torch.zeros(2, 8, 8)}
    parallel = parallelize(Plain("fine"), given, "cp", ComputeConfig(2, 2))
    wrong = (torch.zeros(2, 9), torch.zeros(2, 8, 8).double(), [1, 2], None)
    return [refusal(parallel, x=x) for x in wrong]


def policy_with_a_private_error() -> str:
    """A policy raises something that only its own process knows."""

    class Private(Exception):
        pass

    def policy(ops: Any, config: ComputeConfig) -> dict[str, str]:
        raise Private("not today")

    given = Plain("fine"), {"x": torch.zeros(2, 8, 8)}, policy, ComputeConfig(2, 2)
    return refusal(parallelize, *given)
