"""Context parallelism of accelerate, and of transformers' Trainer, with this package's attention.

    ParallelismConfig(cp_size=2)        as usual: accelerate makes the mesh and distributes the data
    attn_implementation="seqshard"      in place of "sdpa"
    class MyTrainer(ContextParallel, Trainer): ...

accelerate and the Trainer keep the optimizer, the wrapping by FSDP2 and the count of tokens.
What they do about attention is left out: a hook that replaces every mask by a causal one, and
torch's ``context_parallel``. So windows, padding and packed documents are attended as the model
specifies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...core.layout import Layout
from ...layout_ops import wrap_unshard_func
from ...op.arguments import ArgumentError
from ..peer_calls import require_first
from ..transformers import IMPLEMENTATION, register, shard_batch, sum_over_ranks


def use_seqshard(accelerator: Any) -> dist.ProcessGroup:
    """Have ``accelerator.prepare`` leave attention to ``attn_implementation="seqshard"``.

    Call it before ``prepare``, and give the group that it returns to
    :func:`..transformers.shard_batch`. It calls :func:`..transformers.register`.

    Args:
        accelerator: an ``Accelerator`` whose ``parallelism_config`` has a cp_size above 1.
    Returns:
        The ranks over which a sequence is cut: the mesh's dim "cp".
    Raises:
        ValueError: there is no context parallelism, accelerate runs fewer processes than it needs,
            or its hook differs from that of 1.15.
    """
    config = accelerator.parallelism_config
    if config is None or not config.cp_enabled:
        raise ArgumentError(
            "use_seqshard: accelerator has no context parallelism; give Accelerator a "
            f"parallelism_config=ParallelismConfig(cp_size=...) above 1, got {config!r}"
        )
    # On a machine without GPUs, unless cpu=True, each process is alone, whatever the mesh is.
    if accelerator.num_processes < config.cp_size:
        raise _alone("use_seqshard", accelerator, config)
    if not callable(getattr(accelerator, "_prepare_cp", None)):
        raise ArgumentError(
            f"use_seqshard: {type(accelerator).__name__} has no _prepare_cp, by which accelerate "
            "1.15 replaces masks; this version is not known"
        )
    register()
    accelerator._prepare_cp = _unchanged
    group: dist.ProcessGroup = accelerator.torch_device_mesh["cp"].get_group()
    return group


def _alone(title: str, accelerator: Any, config: Any) -> ArgumentError:
    return ArgumentError(
        f"{title}: parallelism_config has cp_size={config.cp_size}, but accelerate runs "
        f"{accelerator.num_processes} process here; start the script with torchrun or accelerate "
        "launch, and on CPUs give TrainingArguments use_cpu=True, or Accelerator cpu=True"
    )


def _unchanged(*prepared: Any) -> tuple[Any, ...]:
    return prepared


class ContextParallel:
    """A mixin that goes before ``Trainer``, or a subclass of it, in a class's bases.

    Every rank of a "cp" group gets the same batch from the Trainer's loader and keeps its own part
    of the tokens, in ``sequence_layout``. Labels are shifted before they are cut; the Trainer
    divides losses by the count of all ranks' tokens, and its optimizer step sums the gradients of
    all ranks. Batches may be packed: ``position_ids`` that restart, or ``cu_seq_lens_q``. In
    evaluation each row counts once, and predictions are of whole rows.

    Raises:
        TypeError: a class has it after Trainer.
        ValueError: the Trainer's arguments ask for context parallelism that this process has no
            part in. In training, an attention other than "seqshard", or a loss that is not the
            model's own loss of each token: label smoothing, ``compute_loss_func``.
    """

    sequence_layout = "zigzag"  # or "contiguous", "striped"; see shard_batch
    sequence_group: dist.ProcessGroup | None = None
    _cut: Layout | None = None  # layout of the last batch that was cut
    _gather: Callable[..., Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        require_first(cls, ContextParallel, "_prepare_context_parallel_inputs")

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's; with context parallelism, its accelerator then leaves attention alone."""
        trainer: Any = super()
        trainer.create_accelerator_and_postprocess()
        accelerator, arguments = self.accelerator, self.args  # type: ignore[attr-defined]
        config, asked = accelerator.parallelism_config, arguments.parallelism_config
        if config is not None and config.cp_enabled:
            if arguments.eval_use_gather_object:
                raise ArgumentError(
                    "ContextParallel: eval_use_gather_object gathers each row from every rank that "
                    "has a part of it; leave it out"
                )
            self.sequence_group = use_seqshard(accelerator)
        elif asked is not None and asked.cp_size > 1:
            raise _alone("ContextParallel", accelerator, asked)

    def _prepare_context_parallel_inputs(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Callable[[], AbstractContextManager[Any]], dict[str, Any]]:
        """The Trainer's hook: the context that a forward and backward run in, and this rank's
        inputs."""
        if self.sequence_group is None:
            return contextlib.nullcontext, inputs
        _check_trainer(self)
        shard = shard_batch(inputs, self.sequence_group, self.sequence_layout)
        self._cut = shard.layout
        return shard.context, dict(shard.inputs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """The Trainer's: the loss of whole rows, and their outputs and labels, which are the same
        on all ranks that share the rows."""
        trainer: Any = super()
        self._cut = None
        loss, outputs, labels = trainer.prediction_step(*args, **kwargs)
        if self._cut is None:
            return loss, outputs, labels
        group = self.sequence_group
        assert group is not None
        loss = sum_over_ranks(loss, group) / group.size()
        return loss, _joined(outputs, self._cut, group), labels

    @property
    def gather_function(self) -> Callable[..., Any]:
        """The Trainer's gather function for evaluation, taking rows from one of the ranks that
        share them."""
        if self.sequence_group is None:
            return self._gather
        return partial(_gather_once, self.accelerator, self._gather)  # type: ignore[attr-defined]

    @gather_function.setter
    def gather_function(self, function: Callable[..., Any]) -> None:
        self._gather = function


def _joined(outputs: Any, layout: Layout, group: dist.ProcessGroup) -> Any:
    """A model's outputs for whole rows, from those for a rank's tokens."""
    if outputs is None:
        return None
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(_joined(each, layout, group) for each in outputs)
    tokens = layout.sizes[group.rank()]
    if not isinstance(outputs, Tensor) or outputs.ndim < 2 or outputs.shape[1] != tokens:
        shown = tuple(getattr(outputs, "shape", ())) or type(outputs).__name__
        raise ArgumentError(
            f"ContextParallel: the model returns {shown}, which is not of this rank's {tokens} "
            "tokens; name it in ignore_keys, or evaluate with prediction_loss_only=True"
        )
    return wrap_unshard_func(outputs, layout, group)


def _gather_once(accelerator: Any, gather: Callable[..., Any], data: Any, **options: Any) -> Any:
    """``gather``, taking rows from only one rank of each group that shares them."""
    mesh, whole = accelerator.torch_device_mesh, accelerator.gather
    firsts = mesh.mesh.select(mesh.mesh_dim_names.index("cp"), 0).flatten().sort().values

    def of_firsts(tensors: Any) -> Any:
        if isinstance(tensors, (list, tuple)):
            return type(tensors)(map(of_firsts, tensors))
        of_ranks = whole(tensors).unflatten(0, (mesh.size(), -1))
        return of_ranks[firsts.to(of_ranks.device)].flatten(0, 1)

    accelerator.gather = of_firsts
    try:
        return gather(data, **options)
    finally:
        del accelerator.gather


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
