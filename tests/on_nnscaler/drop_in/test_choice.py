"""Either config serves either engine. What "auto" is: tests/engine/module/test_choice.py."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import nnscaler
import pytest
import torch

from annotations import ComputeConfig, parallelize
from annotations.engines import nnscaler as engine
from annotations.engines.config import as_own
from on_nnscaler.models import plain_models as models
from on_nnscaler.support.cpu import on_cpu

pytestmark = pytest.mark.nnscaler

CONFIGS = (ComputeConfig(2, 4), nnscaler.ComputeConfig(2, 4))


def test_fields_and_defaults_are_nnscalers() -> None:
    def described(config: type) -> dict[str, Any]:
        return {
            f.name: f.default if f.default_factory is MISSING else f.default_factory()
            for f in fields(config)
        }

    ours, theirs = described(ComputeConfig), described(nnscaler.ComputeConfig)
    assert list(ours) == list(theirs)
    assert ours == theirs


@pytest.mark.parametrize("config", CONFIGS)
def test_either_config_becomes_either(config: Any) -> None:
    assert type(engine.as_config(config)) is nnscaler.ComputeConfig
    assert type(as_own(config)) is ComputeConfig
    for name in ("plan_ngpus", "runtime_ngpus", "use_zero", "pas_config"):
        values = {getattr(c, name) if name != "pas_config" else str(c.pas_config)
                  for c in (config, engine.as_config(config), as_own(config))}  # fmt: skip
        assert len(values) == 1


@pytest.mark.parametrize("config", [ComputeConfig, nnscaler.ComputeConfig])
@pytest.mark.parametrize("name", ["torch", "nnscaler"])
def test_either_config_serves_either_engine(tmp_path: Path, config: type, name: str) -> None:
    module, given = torch.nn.Linear(3, 3), {"input": torch.zeros(2, 3)}
    if name == "torch":
        assert torch.equal(parallelize(module, given, "cp", config(1, 1), engine=name)(**given),
                           module(**given))  # fmt: skip
        return
    with on_cpu():
        made = parallelize(
            models.tiny(), models.batch(0), "tp", config(2, 2, trace_strategy="cpu"),
            engine=name, load_module=False, gen_savedir=tmp_path, reuse="override",
        )  # fmt: skip
    assert made is None and len(list(tmp_path.rglob("gencode*.py"))) == 2


def test_an_unknown_policy() -> None:
    with pytest.raises(ValueError, match="'zz' is unknown to nnscaler; known: cp, cp_follow, auto"):
        parallelize(torch.nn.Linear(3, 3), {}, "zz", CONFIGS[0], engine="nnscaler")
