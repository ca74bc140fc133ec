"""TransformerEngine's context parallelism: over gloo in a stand-in, on GPUs as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import te_cp_jobs
import torch
from dense import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import Case, expected, gather, run_rank
from ranks import JobFailed, Pool, worlds

from customized_ops.ring_attention import AttnMask, Layout, wrap_ring_attn_func
from customized_ops.ring_attention.core.kernels import KernelError, Request
from customized_ops.ring_attention.core.kernels.adapters import te
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.run.te_cp import COMMS, TeDocuments, _refuses

CPU_CASES = {
    "zigzag": Case("zigzag", 32, layout="zigzag", batch=2),
    "zigzag, grouped": Case("zigzag", 16, layout="zigzag", heads=(4, 2)),
    "full": Case("ring", 16, causal=False, batch=2),
    "full, striped": Case("ring", 16, causal=False, layout="striped:16:2:1"),
    "packed": Case("varlen", 24, cu_seqlens=(0, 8, 24), layout="zigzag:24:2:0,8,24", heads=(4, 2)),
    "packed, full": Case(
        "varlen", 24, causal=False, cu_seqlens=(0, 8, 24), layout="zigzag:24:2:0,8,24"
    ),
}
WINDOWS = {
    "window": Case("window", 32, window=(5, 0), layout="zigzag"),
    "packed window": Case(
        "packed window", 24, window=(5, 0), cu_seqlens=(0, 4, 24), layout="zigzag:24:2:0,4,24"
    ),
}
GPU_CASES = {
    "zigzag": Case("zigzag", 1024, layout="zigzag"),
    "full": Case("ring", 1024, causal=False),
    "packed": Case("varlen", 768, cu_seqlens=(0, 256, 768), layout="zigzag:768:{ranks}:0,256,768"),
    "window": Case("window", 1024, window=(100, 0), layout="zigzag"),
}


def whole(case: Case, replies: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """out, dq, dk, dv of all ranks together."""
    with_lse = [
        [out, out.new_zeros(*out.shape[:-3], 1, len(out.movedim(-3, 0))), *rest]
        for out, *rest in replies
    ]
    out, _, *grads = gather(case, with_lse)
    return [out, *grads]


def test_two_ranks_of_the_stand_in(two_ranks: Pool) -> None:
    cases = [(case, kernel) for case in CPU_CASES.values() for kernel in COMMS]
    cases += [(case, kernel) for case in WINDOWS.values() for kernel in COMMS if ":" in kernel]
    replies = two_ranks.run(te_cp_jobs.run_cases, cases, (0, 1), True)
    for n, (case, kernel) in enumerate(cases):
        out, _, *grads = expected(case)
        got = whole(case, [reply[n] for reply in replies])
        for a, b in zip(got, (out, *grads), strict=True):
            assert_same(f"{kernel} {case.op}", a, b)


def test_a_window_on_a_ring_is_refused_before_anything_is_sent(two_ranks: Pool) -> None:
    with pytest.raises(JobFailed, match=r"no window on a ring, .* try kernel='te_cp:all_gather'"):
        two_ranks.run(te_cp_jobs.run_cases, [(WINDOWS["window"], "te_cp")], (0, 1), True)


def test_on_a_cpu() -> None:
    q = torch.zeros(1, 8, 2, 8)
    for kernel in COMMS:
        with pytest.raises(KernelError) as refused:
            wrap_ring_attn_func(q, q, q, kernel=kernel)
        assert str(refused.value) == (
            f"wrap_ring_attn_func: kernel '{kernel}' cannot do this (runs on cuda, not cpu); able, "
            "under this package's own context parallelism: torch, reference"
        )
        with pytest.raises(ValueError, match=f"kernel '{kernel}' takes no reduce_dtype"):
            wrap_ring_attn_func(q, q, q, kernel=kernel, reduce_dtype=torch.bfloat16)


REFUSED = {
    "layout": ("te_cp", AttnMask.causal(16), "contiguous:16:2", {}, "wants layout zigzag:16:2"),
    "uneven": ("te_cp", AttnMask.full(16), "sizes:10,6", {}, "as many tokens on every rank"),
    "length": ("te_cp", AttnMask.causal(18), "zigzag:18:2", {}, "a multiple of 2 x 2 ranks"),
    "mask": ("te_cp", AttnMask.streaming(16, 3, 2), "zigzag:16:2", {}, "no other mask"),
    "documents": ("te_cp", AttnMask.varlen([0, 8, 16]), "zigzag:16:2", {}, "no other mask"),
    "window": ("te_cp", AttnMask.dense(16, window=(3, 0)), "zigzag:16:2", {}, "on a ring"),
    "both sides": (
        "te_cp:all_gather",
        AttnMask.dense(16, window=(3, 3)),
        "zigzag:16:2",
        {},
        "no other mask",
    ),
    "widths": ("te_cp", AttnMask.causal(16), "zigzag:16:2", {"v_dim": 16}, "equally wide"),
    "heads": ("te_cp:a2a", AttnMask.causal(16), "zigzag:16:2", {"kv_heads": 1}, "no multiple of 2"),
    "none": ("te_cp", AttnMask.causal(16), "zigzag:16:2", {}, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    kernel, mask, spec, changes, reason = REFUSED[name]
    layout = Layout.parse(spec)
    sizes = {"head_dim": 8, "v_dim": 8, "q_heads": 4, "kv_heads": 4} | changes
    request = Request(torch.device("cuda"), torch.bfloat16, **sizes)
    said = _refuses(COMMS[kernel], request, make_plan(mask, layout, team_size=1), 2, False)
    assert said is None if reason is None else reason in str(said)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=4),
    st.booleans(),
    st.one_of(st.just(-1), st.integers(0, 4)),
)
def test_documents_are_their_mask(lengths: list[int], causal: bool, left: int) -> None:
    cu = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    window = (left, 0) if left >= 0 else (-1, -1)
    mask = AttnMask.varlen(cu, causal=causal, window=window)
    found = TeDocuments.of(mask)
    assert found is not None and found.cu_seqlens == tuple(cu)
    again = AttnMask.varlen(cu, causal=found.causal, window=found.window)
    assert again == mask


@pytest.mark.parametrize("kernel", COMMS)
@pytest.mark.parametrize("name", GPU_CASES)
@worlds()
def test_gpus(ranks: Pool, name: str, kernel: str) -> None:
    """bf16 and grouped heads: no further from fp64 than one GPU is, twice."""
    if te.missing():
        pytest.skip(te.missing() or "")
    if name == "window" and kernel == "te_cp":
        pytest.skip("the library knows no window on a ring")
    case = on_gpus(GPU_CASES[name], ranks.size)
    replies = ranks.run(te_cp_jobs.run_cases, [(case, kernel)], tuple(range(ranks.size)), False)
    got = whole(case, [reply[0] for reply in replies])
    alone = run_rank(replace(case, layout=None), 0, 1, None)
    out, _, *grads = expected(case)
    one_gpu = alone[0], *alone[2:]
    for many, one, truth in zip(got, one_gpu, (out, *grads), strict=True):
        error_one = (one.cpu().double() - truth).abs().max()
        error_many = (many.double() - truth).abs().max()
        rounding = torch.finfo(many.dtype).eps * truth.abs().max()
        assert error_many <= 2 * error_one + rounding, f"{name} {kernel}"


def on_gpus(case: Case, ranks: int) -> Case:
    """The case in bf16; key heads are as many as an all-to-all of heads wants."""
    layout = case.layout and case.layout.format(ranks=ranks)
    heads = (8, max(2, ranks))
    bf16 = {"dims": (64, 64), "dtype": torch.bfloat16, "device": "cuda"}
    return replace(case, layout=layout, heads=heads, **bf16)
