"""What ``parallelize`` and its modules refuse, on every rank."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import engine_jobs
import pytest
import refusal_jobs
import torch
from ranks import Pool
from torch.optim.swa_utils import AveragedModel

from annotations import ComputeConfig, parallelize

PARALLEL = parallelize(torch.nn.Linear(3, 3), {}, "cp", ComputeConfig(1, 1))


WRONG_SPLIT = """\
PartitionError: wrap_ring_attn_func: 'hd' cannot be split
    b l h hd^, b l h hd^, b l h vd^ -> b l h vd^, b h l
          ^~~
    it is marked frozen: 'hd^'
    can be split over 2 ranks: 'b', 'l', 'h'
    asked for by policy '<lambda>' for ring_attn in the module"""


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no attention", "PolicyError: policy 'cp' has nothing to split: no op that communicates"),
        ("unknown policy", "PolicyError: pas_policy 'diagonal' is unknown; known: cp, dp"),
        ("wrong split", WRONG_SPLIT),
        ("too few to split", "cannot be split on b ('b' = 1) over 2 ranks; it can on: l, h"),
        ("unknown op", "PolicyError: the policy names attn, but the annotated ops are: ring_attn"),
        ("batch of one", "policy 'dp': ring_attn (wrap_ring_attn_func in the module) cannot"),
        ("packed dp", "cannot be split on b over 2 ranks; it can on: l, g, qh"),
        ("wrong ranks", "ValueError: parallelize: runtime_ngpus=3, but the world has 2 ranks"),
        ("one rank", "ValueError: parallelize: runtime_ngpus=1, but the world has 2 ranks"),
        ("value", "CaptureError: the module decides by a tensor's value, as of .item()"),
        ("wrong arguments", "CaptureError: dummy_forward_args do not fit Plain.forward: missing"),
        (
            "examples of their own",
            "CaptureError: the ranks' example arguments must be the same, but differ\n"
            "    x: rank 0 (2, 8, 8) torch.float32, rank 1 (2, 10, 8) torch.float32",
        ),
        ("noise", "draws random numbers, which is not supported yet"),
        ("buffer", "CaptureError: the module changes 'seen' in its forward"),
    ],
)
def test_refusals_reach_every_rank(two_ranks: Pool, what: str, message: str) -> None:
    said = two_ranks.run(refusal_jobs.refused, what)
    assert said[0] == said[1]
    assert message in said[0]


@pytest.mark.parametrize(
    ("what", "differs"),
    [
        ("configs of their own", "compute_config.plan_ngpus: rank 0 2, rank 1 1"),
        ("policies of their own", "pas_policy: rank 0 'cp', rank 1 'dp'"),
        (
            "hoists of their own",
            "compute_config.pas_config: rank 0 {'hoist': False}, rank 1 {'hoist': True}",
        ),
        ("modules of their own", "parameter bias: rank 0 (8,) torch.float32, rank 1 none"),
        ("verified by rank 1", "verify: rank 0 False, rank 1 True"),
        (
            "no data on rank 1",
            "parameter weight: rank 0 (8, 8) torch.float32, "
            "rank 1 (8, 8) torch.float32 without data",
        ),
    ],
)
def test_ranks_must_ask_for_the_same(two_ranks: Pool, what: str, differs: str) -> None:
    said = two_ranks.run(refusal_jobs.refused, what)
    first = "CaptureError: the ranks' calls of parallelize must be the same, but differ"
    assert said == [f"{first}\n    {differs}"] * 2


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("unknown policy", "PolicyError: pas_policy 'diagonal' is unknown"),
        ("field", "NotImplementedError: ComputeConfig: use_zero=1 is not supported"),
        ("mesh", "ValueError: ComputeConfig: pas_config['mesh_shape']=(3,) must be counts"),
        ("option", "ValueError: parallelize: compile=True needs lowered=True"),
        ("class", "NotImplementedError: parallelize: module classes are not supported yet"),
        ("list", "TypeError: parallelize: dummy_forward_args must map"),
        ("name", "CaptureError: dummy_forward_args do not fit Plain.forward: missing"),
        ("verify", "CaptureError: verify's arguments do not fit Plain.forward: missing"),
        ("dtype", "TypeError: parallelize: module_dtype must be a torch.dtype or None, got 'bf16'"),
        ("lazy parameter", "RuntimeError: Can't access the shape of an uninitialized parameter"),
    ],
)
def test_what_one_rank_refuses_reaches_the_other(two_ranks: Pool, what: str, why: str) -> None:
    first, second = two_ranks.run(refusal_jobs.refused, f"{what} of rank 1")
    assert second.startswith(why)
    assert first.startswith("CaptureError: calls of parallelize: refused on another rank")
    assert f"rank 1: {why.split(': ', 1)[1]}" in first


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"config": ComputeConfig(1, 1, pas_config={"mesh_shape": (2,)})}, "must be counts of"),
        ({"policy": None}, "pas_policy None is unknown; known: cp, dp"),
        ({"compute_dtype": "bf16"}, "compute_dtype must be a torch.dtype or None, got 'bf16'"),
        ({"module": torch.nn.Sequential(PARALLEL)}, "is parallelized already"),
        ({"config": ComputeConfig(2, 2), "example": []}, "dummy_forward_args must map"),
        ({"config": ComputeConfig(2, 2)}, "torch.distributed is not initialised"),
    ],
)
def test_what_is_refused_of_one_rank(given: dict[str, Any], why: str) -> None:
    """Though one rank plans nothing, and before anything is asked of others that are not there."""
    wanted = {"example": {"x": torch.zeros(2, 8, 8)}, "policy": "cp", "config": ComputeConfig(1, 1)}
    module = given.pop("module", engine_jobs.Plain("fine"))
    options = {name: given.pop(name) for name in list(given) if name not in wanted}
    with pytest.raises((ValueError, TypeError, RuntimeError), match=re.escape(why)):
        parallelize(module, *(wanted | given).values(), **options)


@pytest.mark.parametrize("use", [copy.copy, copy.deepcopy, pickle.dumps, AveragedModel])
def test_a_parallel_module_is_not_copied(use: Callable[[Any], Any]) -> None:
    with pytest.raises(NotImplementedError, match="cannot be copied or pickled: copy"):
        use(PARALLEL)


@pytest.mark.parametrize("said", [True, False])
def test_ranks_of_a_copy_must_pass_one_batch(two_ranks: Pool, said: bool) -> None:
    """Ranks on CPUs compare them though nobody said so."""
    first, second = two_ranks.run(refusal_jobs.batches_of_their_own, said)
    assert first == second
    text = re.sub("#[0-9a-f]{8}", "#", first)
    assert text == (
        "CaptureError: the ranks' batches of one copy must be the same, but differ\n"
        "    x: rank 0 (2, 8, 8) torch.float32 #, rank 1 (2, 8, 8) torch.float32 #"
    )


def test_a_policys_private_error_reaches_every_rank(two_ranks: Pool) -> None:
    said = two_ranks.run(refusal_jobs.policy_with_a_private_error)
    assert said == ["RuntimeError: Private: not today"] * 2
