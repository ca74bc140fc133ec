"""TransformerEngine's own context parallelism in place of plan, executor and kernel.

    kernel="te_cp"               keys and values go round a ring        (its cp_comm_type "p2p")
    kernel="te_cp:all_gather"    keys and values of all ranks are gathered
    kernel="te_cp:a2a"           tokens become heads and back, as in Ulysses

It takes fewer cases than the executor does, see :func:`refusal`, and is never chosen by "auto".
Engines estimate the cost of a call by what the plan would move. They cut sequences contiguously,
where the library takes full attention only; causal calls name their layout and group.
The library keeps what its backward needs in an autograd graph, which an op cannot hand from its
forward to its backward. So the backward first runs the forward again. It returns no lse, so lse is
NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ..comm import Comm
from ..comm.dist_comm import DistComm
from ..kernels import KernelError, Request
from ..kernels.adapters import te as library
from ..kernels.choice import able
from ..layout import Layout
from ..mask.mask_value import MaskValue
from ..mask.slices import HI, K0, K1, LO, Q0, Q1
from ..merge.merge import accumulation_dtype
from ..plan import Plan

COMMS = {"te_cp": "p2p", "te_cp:all_gather": "all_gather", "te_cp:a2a": "a2a"}


@dataclass(frozen=True)
class TeDocuments:
    """A mask in TransformerEngine's terms: each document attends itself."""

    cu_seqlens: tuple[int, ...]  # where documents start, and where the last ends
    causal: bool  # whether tokens see only those up to their own
    left: int  # how far back tokens see; -1 for all

    @property
    def window(self) -> tuple[int, int]:
        """The library's window_size."""
        return self.left, 0 if self.causal else -1

    @classmethod
    def of(cls, mask: MaskValue) -> TeDocuments | None:
        """The documents of ``mask``, or None if it is no such mask."""
        slices = mask.slices[np.argsort(mask.slices[:, Q0])]
        starts, stops = slices[:, Q0], slices[:, Q1]
        squares = (slices[:, [K0, K1]] == slices[:, [Q0, Q1]]).all()
        cu_seqlens = (0, *stops.tolist())
        if not squares or starts.tolist() != list(cu_seqlens[:-1]):
            return None
        if not cu_seqlens[-1] == mask.q_len == mask.k_len:
            return None
        most = stops - starts - 1
        back = -slices[:, LO]
        left = -1 if (back == most).all() else int(back.max())
        if left >= 0 and (back != np.minimum(left, most)).any():
            return None
        causal = bool((slices[:, HI] == 0).all())
        return cls(cu_seqlens, causal, left) if causal or (slices[:, HI] == most).all() else None


@dataclass(frozen=True)
class TeCall:
    """An op call that TransformerEngine runs as a whole."""

    comm: Comm
    comm_type: str  # the library's name of how tokens move
    documents: TeDocuments
    packed: bool  # whether tensors are [l, h, d]; else [b, l, h, d]
    softmax_scale: float
    deterministic: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out, shaped as q, and lse [b, h, l] or [h, l], all NaN, as it is not known."""
        with torch.no_grad():
            out = self._run(*(t.contiguous() for t in (q, k, v)))
        shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        lse = q.new_full(shape, torch.nan, dtype=accumulation_dtype(q.dtype))
        return out.view(*q.shape[:-1], v.shape[-1]), lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """dq, dk, dv, after another forward."""
        leaves = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
        # In an op's backward torch records no operation but the library's one autograd.Function,
        # so nothing may stand between the leaves and it, nor between it and the gradient.
        with torch.enable_grad():
            out = self._run(*leaves)
        return torch.autograd.grad(out, leaves, dout.reshape(out.shape).contiguous())

    def _run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The library's out for contiguous tensors, in a shape of its own."""
        group = _resolve_process_group(self.comm.name)  # type: ignore[arg-type]
        documents = self.documents
        mask = "causal" if documents.causal else "no_mask"
        if self.packed:
            mask = "padding_causal" if documents.causal else "padding"
        starts = _starts(documents.cu_seqlens, 0 if self.packed else len(q), q.device)
        longest, padded = int(np.diff(documents.cu_seqlens).max()), starts if self.packed else None
        context_parallel = library.module("attention.dot_product_attention.context_parallel")
        return context_parallel.attn_forward_func_with_cp(
            is_training=True,
            **{"q": q, "k": k, "v": v},
            **{"cu_seqlens_q": starts, "cu_seqlens_kv": starts},
            **{"max_seqlen_q": longest, "max_seqlen_kv": longest},
            **{"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded},
            dropout_p=0.0,
            cp_group=group,
            cp_global_ranks=dist.get_process_group_ranks(group),
            cp_stream=_stream(q.device),
            cp_comm_type=self.comm_type,
            softmax_scale=self.softmax_scale,
            qkv_format="thd" if self.packed else "bshd",
            attn_mask_type=mask,
            deterministic=self.deterministic,
            use_fused_attention=True,
            window_size=documents.window,
        )


def choose(
    op: str,
    name: str,
    request: Request,
    plan: Plan,
    comm: Comm,
    softmax_scale: float,
    *,
    packed: bool,
    sink: bool = False,
    deterministic: bool = False,
) -> TeCall:
    """The call that ``name``, one of COMMS, stands for.

    Raises:
        KernelError: it cannot do this; names ``op`` and says why. Every rank finds the same, and
            none has sent anything yet.
    """
    reason = "has no sink" if sink else refusal(name, request, plan, comm, packed=packed)
    if reason is not None:
        raise KernelError(
            f"{op}: kernel {name!r} cannot do this ({reason}); "
            f"able, under this package's own context parallelism: {', '.join(able(request))}"
        )
    documents = TeDocuments.of(plan.mask)
    assert documents is not None
    return TeCall(comm, COMMS[name], documents, packed, softmax_scale, deterministic)


def refusal(name: str, request: Request, plan: Plan, comm: Comm, *, packed: bool) -> str | None:
    """Why a call cannot be TransformerEngine's, to be read after ``name``; None if it can."""
    declared = library.CAPABILITIES[0]
    if request.device.type != declared.device:
        return f"runs on {declared.device}, not {request.device.type}"
    lacking = library.missing()
    if lacking is not None:
        return f"does not run here: {lacking}"
    if "lse gradient" in request.features:
        return "returns no lse; leave return_lse False"
    if not isinstance(comm, DistComm) or comm.size < 2:
        return "runs over a torch process group of two ranks or more"
    return declared.refuses(request) or _refuses(COMMS[name], request, plan, comm.size, packed)


def _refuses(comm_type: str, request: Request, plan: Plan, ranks: int, packed: bool) -> str | None:
    """What in the mask, layouts and shapes TransformerEngine does not take; None: nothing."""
    documents = TeDocuments.of(plan.mask)
    if documents is None or (not packed and len(documents.cu_seqlens) > 2):
        return "knows full, causal and windowed documents that attend themselves, no other mask"
    if documents.left >= 0 and (comm_type == "p2p" or not documents.causal):
        return "has no window on a ring, and none but causal ones; try kernel='te_cp:all_gather'"
    if request.head_dim != request.v_dim:
        return f"wants q, k and v equally wide, not {request.head_dim} and {request.v_dim}"
    heads = request.q_heads, request.kv_heads
    if comm_type == "a2a" and (heads[0] % ranks or heads[1] % ranks):
        return f"splits heads with a2a, and {heads[0]} or {heads[1]} is no multiple of {ranks}"
    if any(length % (2 * ranks) for length in np.diff(documents.cu_seqlens)):
        return f"wants every document's length to be a multiple of 2 x {ranks} ranks"
    if plan.q_layout != plan.k_layout:
        return f"wants keys where the queries are, not {plan.k_layout} beside {plan.q_layout}"
    if not packed and not documents.causal:
        even = len(set(plan.q_layout.sizes)) == 1
        return None if even else f"wants as many tokens on every rank, not {plan.q_layout}"
    cu_seqlens = documents.cu_seqlens if packed else None
    wanted = Layout.zigzag(plan.mask.q_len, ranks, cu_seqlens)
    return None if plan.q_layout == wanted else f"wants layout {wanted}, not {plan.q_layout}"


@lru_cache(maxsize=64)
def _starts(cu_seqlens: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    """int32 on the device: ``cu_seqlens`` of documents, or of a batch of one document each."""
    values = [n * cu_seqlens[-1] for n in range(batch + 1)] if batch else list(cu_seqlens)
    return torch.tensor(values, dtype=torch.int32).to(device)


@lru_cache(maxsize=8)
def _stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which the library computes every other stage."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
