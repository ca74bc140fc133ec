"""The kernel "cudnn_flex": ``cudnn.flex_attention`` of nvidia-cudnn-frontend, any mask in one call.

The library is given the intervals of keys that each row attends, and makes a plan from them on the
GPU: lists of blocks, and a bit for each pair of a block that is attended in part. The host waits
for the plan once per mask, so "auto" takes other kernels where it can.
"""

from __future__ import annotations

import importlib.util
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...mask.intervals import depth
from ...mask.slices import Q0, Q1
from ...merge.merge import unattended
from ..protocol.kernel import BackwardOperands, ForwardOperands, Grads, OutLse, Pairs
from ..protocol.request import HALF, Capabilities
from ..protocol.scoring import Scoring, Tokens
from ..window.block_lists import row_intervals
from ..window.columns import cut_to, first_columns, inputs_of_same_width, operands_of_same_width
from ..window.signatures import unusable

NAME = "cudnn_flex"
CAPABILITIES = (
    Capabilities(
        device="cuda",
        dtypes=HALF,
        features=("window", "lse gradient", "deterministic"),
        widest=128,
        multiple=8,
        arch=(9, 0),
        majors=(9, 10),
    ),
)
# The functions that are called, and the arguments that they are given by name.
NEEDS = {
    "api.create_mask_plan": ("mask_func", "q", "k", "v", "build_backward"),
    "execution._flex_attention_forward": (
        *("q_tensor", "k_tensor", "v_tensor"),
        *("mask_plan", "softmax_scale", "return_lse"),
    ),
    "execution._flex_attention_backward": (
        *("q_tensor", "k_tensor", "v_tensor", "o_tensor", "do_tensor", "lse_tensor"),
        *("mask_plan", "softmax_scale", "deterministic", "dlse_tensor"),
    ),
}


@cache  # a broken install takes long to fail
def missing() -> str | None:
    if importlib.util.find_spec("cudnn") is None:
        return "cudnn is not installed; pip install '.[cudnn]'"
    for name, needed in NEEDS.items():
        if reason := unusable("nvidia-cudnn-frontend", name, partial(_function, name), needed):
            return f"{reason}; version 1.32 would do"
    return None


@cache
def _function(name: str) -> Any:
    module, name = name.split(".")
    return getattr(importlib.import_module(f"cudnn.flex_attention.{module}"), name)


def forward(
    given: ForwardOperands, pairs: Pairs, scoring: Scoring, tokens: Tokens | None
) -> OutLse:
    q, k, v = inputs_of_same_width(given)
    v_dim = given.v.shape[-1]
    if _nothing(pairs):
        return unattended(q, v_dim, q.dtype)
    found = _function("execution._flex_attention_forward")(
        q,
        k,
        v,
        mask_plan=_plan(pairs, q, k, v),
        softmax_scale=scoring.softmax_scale,
        return_lse=True,
    )
    return first_columns(found["o_tensor"], v_dim), found["lse_tensor"]


def backward(
    given: BackwardOperands,
    pairs: Pairs,
    scoring: Scoring,
    tokens: Tokens | None,
    *,
    deterministic: bool = False,
) -> Grads:
    if _nothing(pairs):
        dq, dk, dv = map(torch.zeros_like, (given.q, given.k, given.v))
        return dq, dk, dv
    dout, q, k, v, out, lse, dlse = operands_of_same_width(given)
    found = _function("execution._flex_attention_backward")(
        q,
        k,
        v,
        out,
        dout,
        lse.contiguous(),
        mask_plan=_plan(pairs, q, k, v),
        softmax_scale=scoring.softmax_scale,
        deterministic=deterministic,
        dlse_tensor=None if dlse is None else dlse.contiguous(),
    )
    return cut_to((found["dq_tensor"], found["dk_tensor"], found["dv_tensor"]), given)


def _nothing(pairs: Pairs) -> bool:
    """Whether there are no rows, keys or pairs: the library refuses these, or need not know."""
    return not len(pairs.slices)


def _plan(pairs: Pairs, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The library's plan for these pairs and for tensors of these shapes."""

    def make() -> Any:
        slices = pairs.slices
        most = depth(slices[:, Q0], slices[:, Q1])
        intervals = row_intervals(slices, pairs.q_len, most)
        assert intervals is not None
        ends = torch.from_numpy(_endpoints(intervals)).to(q.device)
        with torch.inference_mode(False):  # the plan is kept for passes of all kinds
            every = ends.repeat(1, len(q)).unsqueeze(0)
            plan = _function("api.create_mask_plan")(every, q, k, v, build_backward=True)
        if q.is_cuda:  # another stream may be the first to use it
            torch.cuda.current_stream(q.device).synchronize()
        return plan

    return pairs.made((NAME, q.shape, k.shape, v.shape, q.dtype, q.device), make)


def _endpoints(intervals: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """int32[rows, n, 2], see :func:`~..window.block_lists.row_intervals` -> int32[2 n + 1, rows]
    that never fall: a row attends [0, F0), [F1, F2) and so on."""
    rows, most, _ = intervals.shape
    start, stop = intervals[..., 0], np.maximum.accumulate(intervals[..., 1], axis=1)
    ends = np.zeros((2 * most + 1, rows), dtype=np.int32)
    ends[1::2] = np.where(intervals[..., 1] > start, start, stop).T
    ends[2::2] = stop.T
    return ends
