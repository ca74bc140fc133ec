"""ComputeConfig and what parallelize needs, without any ranks."""

from __future__ import annotations

import pytest
import torch

from annotations import ComputeConfig, parallelize


def test_counts() -> None:
    config = ComputeConfig(2, 8)
    assert (config.ranks, config.num_scale_units) == (8, 4)


def test_runtime_ngpus_is_the_world_size_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert ComputeConfig(3).ranks == 6


@pytest.mark.parametrize(("plan", "runtime"), [(0, 4), (3, 4), (4, 2), (-1, -1)])
def test_wrong_counts(plan: int, runtime: int) -> None:
    with pytest.raises(ValueError, match="must be a multiple of plan_ngpus"):
        ComputeConfig(plan, runtime)


@pytest.mark.parametrize("name", ["use_zero", "use_fbw", "inference_only", "pas_config"])
def test_fields_for_later_are_named(name: str) -> None:
    module, config = torch.nn.Linear(3, 3), ComputeConfig(1, 1, **{name: True})
    with pytest.raises(
        NotImplementedError, match=f"ComputeConfig: {name}=True is not supported by"
    ):
        parallelize(module, {"input": torch.zeros(2, 3)}, "cp", config, engine="torch")


def test_none_for_a_dict_is_its_default() -> None:
    config = ComputeConfig(1, 1, user_config=None)  # type: ignore[arg-type]
    given = {"input": torch.zeros(2, 3)}
    parallel = parallelize(torch.nn.Linear(3, 3), given, "cp", config, engine="torch")
    assert parallel(**given).shape == (2, 3)


def test_keywords_of_nnscaler_are_refused_by_name_unless_default() -> None:
    module, given = torch.nn.Linear(3, 3), {"input": torch.zeros(2, 3)}
    parallelize(module, given, "cp", ComputeConfig(1, 1), reuse="match", load_module=True)
    with pytest.raises(NotImplementedError, match="parallelize: reuse='override'"):
        parallelize(module, given, "cp", ComputeConfig(1, 1), engine="torch", reuse="override")
    with pytest.raises(TypeError, match="unexpected keyword argument 'resue'"):
        parallelize(module, given, "cp", ComputeConfig(1, 1), resue="match")


def test_module_dtype() -> None:
    module, given = torch.nn.Linear(3, 3), {"input": torch.zeros(2, 3)}
    parallel = parallelize(module, given, "cp", ComputeConfig(1, 1), module_dtype=torch.float64)
    assert parallel.weight.dtype == torch.float64
    assert module.weight.dtype == torch.float32


def test_one_rank_needs_no_process_group() -> None:
    module = torch.nn.Linear(3, 3)
    x = torch.randn(2, 3)
    parallel = parallelize(module, {"input": x}, "cp", ComputeConfig(1, 1))
    assert torch.equal(parallel(x), module(x))
    assert parallel.state_dict().keys() == module.state_dict().keys()
    parallel.sync_grad()


def test_an_unknown_policy_on_one_rank() -> None:
    given = torch.nn.Linear(2, 2), {"input": torch.zeros(1, 2)}, "diagonal", ComputeConfig(1, 1)
    with pytest.raises(ValueError, match="pas_policy 'diagonal' is unknown; known: cp, dp"):
        parallelize(*given, engine="torch")


def test_several_ranks_do() -> None:
    module = torch.nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="is not initialised"):
        parallelize(module, {"input": torch.zeros(2, 3)}, "cp", ComputeConfig(2, 2))


def test_a_class_is_not_supported_yet() -> None:
    with pytest.raises(NotImplementedError, match="module classes"):
        parallelize(torch.nn.Linear, {}, "cp", ComputeConfig(1, 1))


def test_dummy_forward_args_must_be_by_name() -> None:
    with pytest.raises(TypeError, match="must map forward's argument names"):
        parallelize(torch.nn.Linear(3, 3), (torch.zeros(2, 3),), "cp", ComputeConfig(1, 1))
