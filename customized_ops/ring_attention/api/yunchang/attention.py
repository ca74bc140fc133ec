"""A module for attention over a sequence that is cut over ranks, with yunchang's arguments.

It has no parameters, and its only state is how the sequence is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...core.layout import Layout
from ...core.mask import AttnMask
from ...masked_attn import wrap_masked_attn_func
from ...op.arguments import ArgumentError, checked, require
from ...op.tokens.call_layouts import compare_lengths
from ...op.tokens.lengths import CuSeqlens, as_tensor, on_host
from ...ring_attn import wrap_ring_attn_func
from ...ring_attn_varlen import wrap_ring_attn_varlen_func
from ..peer_calls import refuse
from .degrees import RINGS, SequenceParallel, default_parallel


class AttnType(Enum):
    """What computes attention on one device; see the table in ``yunchang``."""

    AITER = "aiter"
    FA = "fa"
    FA3 = "fa3"
    FLASHINFER = "flashinfer"
    TORCH_MATH = "torch_math"
    TORCH_FLASH = "torch_flash"
    TORCH_EFFICIENT = "torch_efficient"
    TORCH_CUDNN = "torch_cudnn"
    SAGE_AUTO = "sage_auto"
    SAGE_FP16 = "sage_fp16"
    SAGE_FP16_TRITON = "sage_fp16_triton"
    SAGE_FP8 = "sage_fp8"
    SAGE_FP8_SM90 = "sage_fp8_sm90"
    SPARSE_SAGE = "sparse_sage"
    NPU = "npu"

    @classmethod
    def from_string(cls, s: str) -> AttnType:
        """The type with this value; ValueError if there is none."""
        return cls(s)


KERNEL_OF_TYPE = {
    AttnType.FA: "auto",
    AttnType.FA3: "flash3",
    AttnType.TORCH_MATH: "reference",
    AttnType.TORCH_FLASH: "torch",
    AttnType.TORCH_EFFICIENT: "torch",
    AttnType.TORCH_CUDNN: "cudnn",
}
KERNELS_NOT_HERE = ("basic_flashinfer", "basic_npu")

MODULE_REFUSALS = {
    name: f"{name}={{value}} is not supported ({why}); leave it at its default"
    for name, why in {
        "use_sync": "the executor decides when a rank waits, and memory does not wait for it",
        "use_pack_qkv": "the executor decides what travels in one message",
        "attn_processor": "it is for SPARSE_SAGE, which skips pairs",
    }.items()
}


class SequenceAttention(torch.nn.Module):
    """Attention over the ranks of a :class:`SequenceParallel`.

    Args:
        parallel: None for the one that ``set_seq_parallel_pg`` made last.
        dims: scatter_idx and gather_idx, which must be DIMS.
        refused: arguments that must be None or False.

    Attributes:
        parallel: the ranks, and which of them share out heads.
        ring_impl_type: the layout of tokens. kernel: which kernel computes attention.
        team_size: ranks that share out heads; None: what the plan finds fastest.
    """

    DIMS: ClassVar = (2, 1)

    def __init__(
        self,
        parallel: SequenceParallel | None,
        ring_impl_type: str,
        attn_type: AttnType,
        dims: tuple[int, int],
        **refused: object,
    ) -> None:
        super().__init__()
        self.title = type(self).__name__
        refuse(self.title, MODULE_REFUSALS, **refused)
        if dims != self.DIMS:
            raise ArgumentError(
                f"{self.title}: scatter_idx and gather_idx must be {self.DIMS[0]} and "
                f"{self.DIMS[1]}, the dims of heads and of tokens, got {dims[0]!r} and {dims[1]!r}"
            )
        self.ring_impl_type = ring_impl_type
        self.kernel = _kernel_of(self.title, ring_impl_type, attn_type)
        self.parallel = parallel or default_parallel(self.title)
        self.team_size = self.parallel.team_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        *args: Any,
        cu_seqlens: CuSeqlens | None = None,
        mask: AttnMask | None = None,
        total: int | None = None,
        dropout_seed: int | Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention of this rank's tokens to the whole sequence.

        Args:
            query: [b, l, h, d], this rank's tokens; [l, h, d] with ``cu_seqlens``.
            key, value: [b, l, g, d], or [l, g, d]; h is a multiple of g.
            window_size: (left, right) tokens around each; -1 is unbounded.
            alibi_slopes: [h] or [b, h]: what a score loses per token of distance.
            cu_seqlens: cumulative lengths of documents of the whole sequence.
            mask: which pairs attend, in place of ``causal``, ``window_size`` and ``cu_seqlens``.
            total: tokens over all ranks, if ranks hold different numbers of them.
            dropout_seed: the same on every rank; None draws one from torch's generator.
            return_lse: also return the log-sum-exp, [b, h, l] or [h, l]; gradients flow through it.
        Returns:
            A tensor shaped like query, in its dtype; with ``return_lse`` also the log-sum-exp.
        Raises:
            ValueError: shapes, heads, lengths or arguments do not fit; the message says what would.
        """

        def check() -> dict[str, Layout]:
            if args:
                raise ArgumentError(f"{self.title}: takes no further arguments, got {args!r}")
            windowed = window_size not in ((-1, -1), [-1, -1])
            if mask is not None and (causal or cu_seqlens is not None or windowed):
                raise ArgumentError(
                    f"{self.title}: mask says which pairs attend; leave causal, window_size and "
                    "cu_seqlens at their defaults"
                )
            return self._layouts(query, cu_seqlens, mask, total)

        options: dict[str, Any] = {
            **checked(self.title, self.parallel.process_group, check),
            "dropout_p": dropout_p,
            "softmax_scale": softmax_scale,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes,
            "deterministic": deterministic,
            "dropout_seed": dropout_seed,
            "return_lse": return_lse,
            "process_group": self.parallel.process_group,
            "kernel": self.kernel,
            "team_size": self.team_size,
        }
        if mask is not None:
            return wrap_masked_attn_func(query, key, value, mask, **options)
        options |= {"causal": causal, "window_size": window_size}
        if cu_seqlens is None:
            return wrap_ring_attn_func(query, key, value, **options)
        return wrap_ring_attn_varlen_func(query, key, value, cu_seqlens, cu_seqlens, **options)

    def _layouts(
        self, query: Tensor, cu_seqlens: CuSeqlens | None, mask: AttnMask | None, total: int | None
    ) -> dict[str, Layout]:
        """``layout`` and, with a mask, ``k_layout``, with the numbers of tokens that the arguments
        imply."""
        if total is not None and (mask is not None or cu_seqlens is not None):
            raise ArgumentError(
                f"{self.title}: mask and cu_seqlens say how many tokens there are; leave total "
                f"None, got {total!r}"
            )
        wanted = "[l, h, d]" if cu_seqlens is not None else "[b, l, h, d]"
        if not isinstance(query, Tensor) or query.ndim != wanted.count(",") + 1:
            shown = tuple(query.shape) if isinstance(query, Tensor) else query
            raise ArgumentError(f"{self.title}: query must be {wanted}, got {shown!r}")
        if self.team_size is not None and self.team_size > query.shape[-2]:
            raise ArgumentError(
                f"{self.title}: a Ulysses degree of {self.team_size} needs as many heads, but "
                f"query has {query.shape[-2]}"
            )
        if mask is not None:
            return {"layout": self._layout(mask.q_len), "k_layout": self._layout(mask.k_len)}
        if cu_seqlens is not None:
            total = int(on_host(as_tensor(self.title, "cu_seqlens", cu_seqlens))[-1])
        return {"layout": self._even(query.shape[1]) if total is None else self._layout(total)}

    def _layout(self, total: int) -> Layout:
        return self.parallel.layout(self.ring_impl_type, total)

    def _even(self, local: int) -> Layout:
        """The layout with ``local`` tokens on every rank; ranks compare this number."""
        remedy = "give total, the number of tokens over all ranks"
        if not torch.compiler.is_compiling():
            compare_lengths(self.title, self.parallel.comm, local, remedy)
        layout = self._layout(local * self.parallel.size)
        if set(layout.sizes) != {local}:
            raise ArgumentError(
                f"{self.title}: {local} tokens on each of {layout.group_size} ranks are not laid "
                f"out {self.ring_impl_type}, which gives the ranks {list(layout.sizes)}; {remedy}"
            )
        return layout


def _kernel_of(title: str, ring_impl_type: str, attn_type: AttnType) -> str:
    known = f"one of {', '.join(RINGS)}"
    require(ring_impl_type in RINGS, title, "ring_impl_type", known, ring_impl_type)
    require(isinstance(attn_type, AttnType), title, "attn_type", "an AttnType", attn_type)
    if ring_impl_type in KERNELS_NOT_HERE or attn_type not in KERNEL_OF_TYPE:
        able = ", ".join(str(each) for each in KERNEL_OF_TYPE)
        raise NotImplementedError(
            f"{title}: ring_impl_type={ring_impl_type!r}, attn_type={attn_type} ask for a kernel "
            f"that is not here; attn_type can be {able}, ring_impl_type none of "
            f"{', '.join(KERNELS_NOT_HERE)}"
        )
    torchs = ring_impl_type == "basic_pytorch" and attn_type is AttnType.FA
    return "torch" if torchs else KERNEL_OF_TYPE[attn_type]
