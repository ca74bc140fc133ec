"""Sequence-parallel attention as annotated ops.

Same names, arguments and order as nnscaler's ``customized_ops.ring_attention``.

.. include:: docs/attention.md
"""

from annotations.consistency import DisagreementError
from annotations.groups import GroupError

from .core.comm.comm_groups import group_costs
from .core.comm.inprocess import run_ranks
from .core.comm.patience import PeerFailed
from .core.cost import CostModel
from .core.kernels import KernelError
from .core.layout import Layout, LayoutError
from .core.mask import AttnMask, MaskError
from .core.plan import Plan
from .core.run.replays.replay import replay
from .layout_ops import (
    wrap_roll_func,
    wrap_shard_func,
    wrap_shuffle_func,
    wrap_unshard_func,
    wrap_unshuffle_func,
)
from .masked_attn import wrap_masked_attn_func
from .maybe_shuffle import wrap_maybe_shuffle, wrap_maybe_unshuffle
from .op.arguments import ArgumentError
from .packed_batches import PackDocuments, PackedBatch, packed_batches
from .probes import ModelRun, ProbeError, ProbeReport, check_parallel_model
from .public_calls import make_plan  # the module declares all functions here to engines
from .ring_attn import wrap_ring_attn_func
from .ring_attn_varlen import wrap_ring_attn_varlen_func
from .rollouts import PackedRollouts, PackRollouts, RolloutPart, pack_rollouts, rollout_parts
from .sliding_window_attn import wrap_sliding_window_attn_func
from .streaming_attn import wrap_streaming_attn_func
from .warm_up import compiled_kernels, warm_up
from .zigzag_allgather_attn_varlen import wrap_zigzag_allgather_attn_varlen_func
from .zigzag_attn import wrap_zigzag_attn_func

__all__ = [
    "ArgumentError",
    "AttnMask",
    "CostModel",
    "DisagreementError",
    "GroupError",
    "KernelError",
    "Layout",
    "LayoutError",
    "MaskError",
    "ModelRun",
    "PackDocuments",
    "PackRollouts",
    "PackedBatch",
    "PackedRollouts",
    "PeerFailed",
    "Plan",
    "ProbeError",
    "ProbeReport",
    "RolloutPart",
    "check_parallel_model",
    "compiled_kernels",
    "group_costs",
    "make_plan",
    "pack_rollouts",
    "packed_batches",
    "replay",
    "rollout_parts",
    "run_ranks",
    "warm_up",
    "wrap_masked_attn_func",
    "wrap_maybe_shuffle",
    "wrap_maybe_unshuffle",
    "wrap_ring_attn_func",
    "wrap_ring_attn_varlen_func",
    "wrap_roll_func",
    "wrap_shard_func",
    "wrap_shuffle_func",
    "wrap_sliding_window_attn_func",
    "wrap_streaming_attn_func",
    "wrap_unshard_func",
    "wrap_unshuffle_func",
    "wrap_zigzag_allgather_attn_varlen_func",
    "wrap_zigzag_attn_func",
]
