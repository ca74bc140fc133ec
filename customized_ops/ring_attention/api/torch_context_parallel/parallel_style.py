"""A style for ``parallelize_module``: modules whose attention runs over ranks."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ...core.layout import Layout
from ...op.arguments import ArgumentError
from ..peer_calls import group_of
from .interception import enter, leave
from .sdpa import SequenceSharding


class AttentionType(Enum):
    """Which function a module calls; both work whichever is named."""

    FLEX = "flex_attention"
    SDPA = "scaled_dot_product_attention"


class ContextParallel(ParallelStyle):
    """A style for ``parallelize_module``: within the module's forward, attention is over the whole
    sequence. The module's inputs are this rank's tokens, as tensors.

    Args:
        seq_dim: of q, k and v; must be 2.
        attention_type: an AttentionType; for FLEX, the module must call this package's function.
        layout: which tokens each rank holds; None is equal numbers on each, in order.
        kernel: as in ``wrap_masked_attn_func``.
    """

    AttentionType: ClassVar = AttentionType  # where torch has it

    def __init__(
        self,
        seq_dim: int = 2,
        attention_type: Enum = AttentionType.SDPA,
        *,
        layout: Layout | None = None,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        if seq_dim != 2:
            raise NotImplementedError(
                f"ContextParallel: seq_dim={seq_dim}: torch's attention has its tokens in dim 2"
            )
        try:  # torch's own enumeration works as well
            AttentionType(getattr(attention_type, "value", attention_type))
        except ValueError:
            known = ", ".join(map(str, AttentionType))
            raise ArgumentError(
                f"ContextParallel: attention_type={attention_type!r} is none of {known}"
            ) from None
        if layout is not None and not isinstance(layout, Layout):
            raise ArgumentError(
                f"ContextParallel: layout must be a Layout or None, got {layout!r}: a module knows "
                "only its rank's tokens, as in Layout.zigzag(total, ranks)"
            )
        self.layout, self.kernel = layout, kernel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = group_of("ContextParallel", device_mesh)
        sharding = SequenceSharding(group, self.layout, self.kernel)
        module.register_forward_pre_hook(lambda module, args: enter(sharding))
        module.register_forward_hook(lambda module, args, output: leave(), always_call=True)
        return module
