"""yunchang's arguments that say by what attention is computed, and what is refused of them."""

from __future__ import annotations

from enum import Enum

from ...op.arguments import ArgumentError
from .degrees import RINGS


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
        """The type of this value; ValueError if there is none."""
        return cls(s)


KERNELS = {
    AttnType.FA: "auto",
    AttnType.FA3: "flash3",
    AttnType.TORCH_MATH: "reference",
    AttnType.TORCH_FLASH: "torch",
    AttnType.TORCH_EFFICIENT: "torch",
    AttnType.TORCH_CUDNN: "cudnn",
}
OTHER_KERNELS = ("basic_flashinfer", "basic_npu")

WHY = {
    "use_sync": "the executor decides when a rank waits, and memory does not wait for it",
    "use_pack_qkv": "the executor decides what travels in one message",
    "attn_processor": "it is for SPARSE_SAGE, which skips pairs",
}


def refuse(title: str, **given: object) -> None:
    """Raises NotImplementedError, with the reason, for what is neither None nor False."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"{title}: {name}={value!r} is not supported ({WHY[name]}); leave it at its default"
            )


def check_dims(title: str, given: tuple[int, int], wanted: tuple[int, int]) -> None:
    """Raises ArgumentError for other dims of heads and of tokens than those wanted."""
    if given != wanted:
        raise ArgumentError(
            f"{title}: scatter_idx and gather_idx must be {wanted[0]} and {wanted[1]}, the dims of "
            f"heads and of tokens, got {given[0]!r} and {given[1]!r}"
        )


def kernel_of(title: str, ring_impl_type: str, attn_type: AttnType) -> str:
    """The name of the kernel that is asked for.

    Raises:
        ArgumentError: not one of yunchang's names.
        NotImplementedError: one of a kernel that is not here.
    """
    if ring_impl_type not in RINGS:
        raise ArgumentError(
            f"{title}: ring_impl_type must be one of {', '.join(RINGS)}, got {ring_impl_type!r}"
        )
    if not isinstance(attn_type, AttnType):
        raise ArgumentError(f"{title}: attn_type must be an AttnType, got {attn_type!r}")
    if ring_impl_type in OTHER_KERNELS or attn_type not in KERNELS:
        able = ", ".join(str(each) for each in KERNELS)
        raise NotImplementedError(
            f"{title}: ring_impl_type={ring_impl_type!r}, attn_type={attn_type} ask for a kernel "
            f"that is not here; attn_type can be {able}, ring_impl_type none of "
            f"{', '.join(OTHER_KERNELS)}"
        )
    torchs = ring_impl_type == "basic_pytorch" and attn_type is AttnType.FA
    return "torch" if torchs else KERNELS[attn_type]
