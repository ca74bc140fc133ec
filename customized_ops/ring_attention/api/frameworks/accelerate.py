"""Context parallelism of accelerate, and of transformers' Trainer, with this package's attention.

    ParallelismConfig(cp_size=2)        as ever: accelerate makes the mesh and deals out the data
    attn_implementation="seqshard"      in place of "sdpa"
    class MyTrainer(ContextParallel, Trainer): ...

accelerate and the Trainer keep the optimizer, the wrapping by FSDP2 and the count of tokens. What
they do about attention is left out: a hook that replaces every mask by a causal one, and torch's
``context_parallel``. So windows, padding and packed documents are attended as the model says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from ...op.arguments import ArgumentError
from ..transformers import IMPLEMENTATION, register, shard_batch


def use_seqshard(accelerator: Any) -> dist.ProcessGroup:
    """Have ``accelerator.prepare`` leave attention to ``attn_implementation="seqshard"``.

    Call it before ``prepare``, and give the group that it returns to
    :func:`..transformers.shard_batch`. It calls :func:`..transformers.register`.

    Args:
        accelerator: an ``Accelerator`` whose ``parallelism_config`` has a cp_size above 1.
    Returns:
        The ranks that a sequence is cut over: the mesh's dim "cp".
    Raises:
        ValueError: there is no context parallelism, or accelerate has another hook than 1.15.
    """
    config = accelerator.parallelism_config
    if config is None or not config.cp_enabled:
        raise ArgumentError(
            "use_seqshard: accelerator has no context parallelism; give Accelerator a "
            f"parallelism_config=ParallelismConfig(cp_size=...) above 1, got {config!r}"
        )
    if not callable(getattr(accelerator, "_prepare_cp", None)):
        raise ArgumentError(
            f"use_seqshard: {type(accelerator).__name__} has no _prepare_cp, by which accelerate "
            "1.15 replaces masks; this version is not known"
        )
    register()
    accelerator._prepare_cp = _unchanged
    group: dist.ProcessGroup = accelerator.torch_device_mesh["cp"].get_group()
    return group


def _unchanged(*prepared: Any) -> tuple[Any, ...]:
    return prepared


class ContextParallel:
    """Goes before ``Trainer``, or a subclass of it, in a class's bases.

    Every rank of a "cp" group gets the same batch from the Trainer's loader and keeps its tokens of
    it, in ``sequence_layout``. Labels are shifted before they are cut; the Trainer divides losses
    by the count of all ranks' tokens and its optimizer step sums the gradients of all. Batches may
    be packed: ``position_ids`` that begin anew, or ``cu_seq_lens_q``.

    Raises:
        ValueError: in training, an attention other than "seqshard", or a loss that is not the
            model's own of each token: label smoothing, ``compute_loss_func``.
    """

    sequence_layout = "zigzag"  # or "contiguous", "striped"; see shard_batch
    sequence_group: dist.ProcessGroup | None = None

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's; with context parallelism, its accelerator leaves attention alone."""
        trainer: Any = super()
        trainer.create_accelerator_and_postprocess()
        accelerator = self.accelerator  # type: ignore[attr-defined]
        config = accelerator.parallelism_config
        if config is not None and config.cp_enabled:
            self.sequence_group = use_seqshard(accelerator)

    def _prepare_context_parallel_inputs(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Callable[[], AbstractContextManager[Any]], dict[str, Any]]:
        """The Trainer's hook: what a forward and backward run in, and this rank's inputs."""
        if self.sequence_group is None:
            return contextlib.nullcontext, inputs
        _check_trainer(self)
        shard = shard_batch(inputs, self.sequence_group, self.sequence_layout)
        return shard.context, dict(shard.inputs)


def _check_trainer(trainer: Any) -> None:
    found = getattr(trainer.model.config, "_attn_implementation", None)
    if found != IMPLEMENTATION:
        raise ArgumentError(
            f"ContextParallel: the model's attn_implementation is {found!r}; load it with "
            f"attn_implementation={IMPLEMENTATION!r}"
        )
    for name in ("compute_loss_func", "label_smoother"):
        if getattr(trainer, name) is not None:
            raise ArgumentError(
                f"ContextParallel: {name} is given labels that are not shifted, and shifts a "
                "rank's part of them; leave it out: the model's own loss is taken"
            )
    if not trainer.model_accepts_loss_kwargs:
        raise ArgumentError(
            f"ContextParallel: {type(trainer.model).__name__} takes no num_items_in_batch, so its "
            "loss is a mean over a rank's tokens; take a model whose forward has **kwargs"
        )
