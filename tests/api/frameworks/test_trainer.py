"""The Trainer of transformers with its sequences over ranks: what evaluation gathers, what is cast,
and what would not be attended over ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Pool, worlds
from torch import nn

pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5")

import trainer_jobs
from accelerate.big_modeling import _attach_context_parallel_hooks
from hf_models import batch, tiny
from transformers import Trainer

from customized_ops.ring_attention import Layout
from customized_ops.ring_attention.api.frameworks.accelerate import (
    ContextParallel,
    _joined,
    use_seqshard,
)
from customized_ops.ring_attention.api.transformers import attention


@worlds(cpus=[2, 4], gpus=[])
def test_evaluation_counts_each_row_once(ranks: Pool) -> None:
    """On four ranks two groups share the rows of a batch."""
    groups = ranks.size // 2
    loss, predictions, labels, plain = trainer_jobs.evaluated(Trainer, "sdpa", 2 * groups)
    assert predictions.shape == plain.shape == (5, 26, 48)
    for found in ranks.run(trainer_jobs.on_ranks, 2):
        assert groups > 1 or abs(found[0] - loss) < 2e-6  # of fp32 logits
        assert found[1].shape == found[3].shape == predictions.shape
        assert np.abs(found[1] - predictions).max() < 1e-10
        assert (found[2] == labels).all()
        assert np.abs(found[3] - plain).max() < 1e-10


def test_outputs_that_are_not_of_tokens() -> None:
    first: Any = SimpleNamespace(rank=lambda: 0)
    layout = Layout.contiguous(8, 2)
    assert _joined((None,), layout, first) == (None,)
    for output, shown in ((torch.zeros(2, 3), r"\(2, 3\)"), ("text", "str")):
        with pytest.raises(ValueError, match=f"the model returns {shown}, which is not of this"):
            _joined([output], layout, first)


def test_the_order_of_bases() -> None:
    class Plain(Trainer):
        pass

    class First(ContextParallel, Plain):
        pass

    class Later(First):
        pass

    for bases in ((Trainer, ContextParallel), (Plain, ContextParallel)):
        with pytest.raises(TypeError, match=r"write class Wrong\(ContextParallel, \.\.\.\)"):
            type("Wrong", bases, {})


class Stub:
    """A Trainer whose accelerator is the one it is given."""

    def __init__(self, accelerator: Any, **arguments: Any) -> None:
        self.accelerator = accelerator
        self.args = SimpleNamespace(eval_use_gather_object=False, **arguments)
        self.create_accelerator_and_postprocess()

    def create_accelerator_and_postprocess(self) -> None:
        """Nothing more."""


class StubTrainer(ContextParallel, Stub):
    pass


def test_processes_that_would_train_alone() -> None:
    """As on CPUs without use_cpu=True; and where an accelerator was made before, without sizes."""
    config = SimpleNamespace(cp_size=2, cp_enabled=True)
    for of_accelerator in (config, None):
        alone = SimpleNamespace(num_processes=1, parallelism_config=of_accelerator)
        with pytest.raises(ValueError, match=r"cp_size=2, but accelerate runs 1 process here"):
            StubTrainer(alone, parallelism_config=config)
    with pytest.raises(ValueError, match="or Accelerator cpu=True"):
        use_seqshard(SimpleNamespace(num_processes=1, parallelism_config=config))
    assert StubTrainer(alone, parallelism_config=None).sequence_group is None


def test_autocast_casts_what_attention_is_given() -> None:
    module = nn.Module()
    q, k, v = (torch.randn(1, heads, 6, 8) for heads in (4, 2, 2))
    low = (t.bfloat16() for t in (q, k, v))
    expected, _ = attention(module, *low, None)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attention(module, q, k, v.bfloat16(), None)
        whole, _ = attention(module, q.double(), k.double(), v.double(), None)
    assert torch.equal(out, expected) and out.dtype == torch.bfloat16
    assert whole.dtype == torch.float64


def test_sequences_that_accelerate_cuts() -> None:
    """Without ContextParallel, or use_seqshard, each rank would attend its own tokens alone."""
    model = tiny("llama")
    model.set_attn_implementation("seqshard")
    given = {name: t for name, t in batch("plain").items() if name != "attention_mask"}
    model(**given)
    _attach_context_parallel_hooks(model)
    with pytest.raises(ValueError, match="with the Trainer put ContextParallel first in the bases"):
        model(**given)
