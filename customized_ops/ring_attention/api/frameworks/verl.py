"""Sequence parallelism of verl's FSDP engine, with this package's attention.

    ulysses_sequence_parallel_size=2        as usual: verl makes the mesh and distributes the data
    class Engine(SequenceParallel, FSDPEngineWithLMHead): ...

verl keeps its packing, micro-batches, losses, FSDP and optimizer. Each rank runs its own tokens of
the packed rollouts, and every rank gets the log-probs, entropies and values of all tokens in order.
In verl, ``ulysses_pad_and_slice_inputs`` and ``gather_outputs_and_unpad`` do this. Nothing is
padded for the ranks. verl is not needed to import this.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor

from ...core.comm.comm_groups import group_comm
from ...layout_ops import wrap_unshard_func
from ...op.arguments import ArgumentError
from ..peer_calls import require_first
from ..transformers import IMPLEMENTATION, Shard, register, shard_batch

TOKENS = ("input_ids", "position_ids")  # names among the inputs that the engine prepares


class SequenceParallel:
    """A mixin that goes before ``FSDPEngineWithLMHead`` or ``FSDPEngineWithValueHead`` of verl
    0.9.1 in a class's bases.

    Every rank of ``ulysses_parallel_group`` gets the same rollouts and keeps its tokens of each
    micro-batch, in ``sequence_layout``. The gradient of gathered outputs is added up over these
    ranks, as in verl itself, and FSDP's averaging cancels that.

    Raises:
        TypeError: a class has it after an engine.
        ValueError: inputs that it is not known how to cut, such as images or those of fused
            kernels; or distillation, which cuts the teacher's logits.
    """

    sequence_layout = "zigzag"  # or "contiguous", "striped", "balanced"; see shard_batch
    _shard: Shard | None = None  # the last micro-batch that was cut
    _running: ExitStack

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        require_first(cls, SequenceParallel, "prepare_model_inputs")

    def _init_device_mesh(self) -> None:
        """verl's; afterwards verl treats sequences as whole."""
        engine: Any = super()
        engine._init_device_mesh()
        self.use_ulysses_sp = False

    def _build_module(self) -> Any:
        """verl's, with ``attn_implementation="seqshard"``, whatever the model was loaded with."""
        engine: Any = super()
        module = engine._build_module()
        if self.ulysses_parallel_group is not None:  # type: ignore[attr-defined]
            register()
            module.set_attn_implementation(IMPLEMENTATION)
        return module

    def forward_step(self, *args: Any, **options: Any) -> Any:
        """verl's, inside the context of the micro-batch that the step cuts."""
        engine: Any = super()
        with ExitStack() as self._running:
            return engine.forward_step(*args, **options)

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """verl's, reduced to this rank's tokens."""
        engine: Any = super()
        inputs, outputs = engine.prepare_model_inputs(micro_batch)
        group = self.ulysses_parallel_group  # type: ignore[attr-defined]
        if group is None:
            return inputs, outputs
        more = [n for n, given in inputs.items() if n not in TOKENS and given is not None]
        if micro_batch.get("distillation_use_topk", False):
            more.append("distillation_use_topk")
        if more:
            raise ArgumentError(
                f"SequenceParallel: {', '.join(more)}: how to cut this over ranks is not known; "
                "train on text, with use_fused_kernels=False and no top-k distillation"
            )
        self._shard = shard_batch({n: inputs[n] for n in TOKENS}, group, self.sequence_layout)
        self._running.enter_context(self._shard.context())
        rank = group_comm(group).rank
        for name in ("input_ids_rmpad_rolled", "temperature_rmpad"):
            outputs[name] = self._shard.layout.shard(outputs[name], rank, dim=0)
        return {**inputs, **{n: self._shard.inputs[n] for n in TOKENS}}, outputs

    def _gather_and_unpad_packed(self, tensor: Tensor, pad_size: int) -> Tensor:
        """[t of this rank] -> [t of all ranks without the last ``pad_size``], in order."""
        group = self.ulysses_parallel_group  # type: ignore[attr-defined]
        if group is not None:
            assert self._shard is not None
            tensor = wrap_unshard_func(tensor, self._shard.layout, group, dim=0)
        return tensor[: len(tensor) - pad_size]
