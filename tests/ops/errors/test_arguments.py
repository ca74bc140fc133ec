"""What a wrong call says, before anything is computed or sent."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refusals

from annotations import BindingError
from customized_ops.ring_attention import (
    AttnMask,
    KernelError,
    Layout,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.core.kernels import KERNELS

from .error_cases import PK, PQ, K, Q, masked


@pytest.mark.parametrize("op", [wrap_ring_attn_func, wrap_zigzag_attn_func])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.zeros(2, 8, 3, 16)}, "q has 4 heads and k has 3"),
        ({"k": torch.zeros(2, 7, 2, 16)}, "dim 1 of k is 'l' = 8 from dim 1 of q"),
        ({"v": torch.zeros(2, 9, 2, 16)}, "dim 1 of v is 'l' = 8 from dim 1 of q"),
        ({"v": torch.zeros(2, 8, 4, 16)}, "dim 2 of v is 'g' = 2"),
        ({"k": torch.zeros(2, 8, 2, 8)}, "dim 3 of k is 'hd' = 16"),
        ({"k": torch.zeros(1, 8, 2, 16)}, "dim 0 of k is 'b' = 2"),
        ({"q": torch.zeros(8, 4, 16)}, "argument 'q' does not fit the annotation"),
        ({"k": K.double()}, "k is torch.float64 but q is torch.float32"),
        ({"q": Q.long(), "k": K.long(), "v": K.long()}, "must be floating point"),
        ({"window_size": (3,)}, "window_size must be (left, right)"),
        ({"window_size": (-2, 0)}, "window_size must be (left, right)"),
        ({"causal": "yes"}, "causal must be True or False, got 'yes'"),
        ({"causal": np.array([1, 0])}, "causal must be True or False, got array([1, 0])"),
        ({"window_size": (True, 0)}, "window_size must be (left, right)"),
        ({"window_size": (np.bool_(True), 0)}, "window_size must be (left, right)"),
        ({"window_size": (2**63, 0)}, "window_size must be (left, right)"),
        ({"q": Q[..., :0], "k": K[..., :0]}, "softmax_scale must be given where the head dim of q"),
        ({"kernel": "fastest"}, f"kernel 'fastest' is unknown; known: auto, {', '.join(KERNELS)}"),
        ({"kernel": "te_cp:ring"}, "reference, te_cp, te_cp:all_gather, te_cp:a2a"),
        ({"process_group": "world"}, "process_group must be"),
        ({"process_group": [1, 0]}, "increasing order"),
        ({"process_group": [0, 1]}, "not initialised"),
        ({"layout": Layout.contiguous(16, 2)}, "is for 2 ranks, but the group has 1"),
        ({"layout": Layout.contiguous(9, 1)}, "holds 8 tokens, but layout contiguous:9:1 gives it"),
    ],
)
def test_dense_ops_refuse(op: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        op(**{"q": Q, "k": K, "v": K, **changed})
    if "group" not in message and "kernel" not in changed and "initialised" not in message:
        assert "increasing" in message or op.__name__ in str(caught.value)


def test_numpy_numbers_will_do() -> None:
    torch.manual_seed(0)
    q, k = torch.randn_like(Q), torch.randn_like(K)
    cu = [0, 5, 8]

    def results(integer: Any, real: Any, switch: Any) -> list[torch.Tensor]:
        drop = {"dropout_p": real(0.5), "dropout_seed": integer(7), "softmax_scale": real(0.25)}
        most = {"max_seqlen_q": integer(5), "max_seqlen_k": integer(6)}
        return [
            wrap_ring_attn_func(q, k, k, window_size=(integer(3), integer(-1)), **drop),
            wrap_ring_attn_func(q, k, k, causal=switch(True), deterministic=switch(False)),
            wrap_streaming_attn_func(q, k, k, integer(2), integer(1)),
            wrap_streaming_attn_func(q, k, k, integer(-1), 0),
            wrap_ring_attn_varlen_func(q[0], k[0], k[0], cu, cu, enable_ring=switch(0), **most),
        ]

    plain = results(int, float, bool)
    for integer, real, switch in ((np.int32, np.float32, np.bool_), (np.int64, np.float64, int)):
        for a, b in zip(plain, results(integer, real, switch), strict=True):
            assert torch.equal(a, b)


CUTE = [
    (wrap_sliding_window_attn_func, ()),
    (wrap_sliding_window_attn_func, ([0, 8], [0, 8])),
    (wrap_ring_attn_varlen_func, ([0, 8], [0, 8])),
]
WITH_PROBS = [(wrap_ring_attn_func, ()), (wrap_zigzag_attn_func, ()), *CUTE]


@pytest.mark.parametrize(("op", "cu_seqlens"), CUTE)
def test_cute_is_flash4(op: Any, cu_seqlens: Any) -> None:
    q, k = (PQ, PK) if cu_seqlens else (Q, K)
    for given in ({}, {"kernel": "flash4"}):
        with pytest.raises(KernelError, match=r"flash4.* on cuda, not cpu"):
            op(q, k, k, *cu_seqlens, use_cute=True, **given)
    with pytest.raises(ValueError, match="use_cute=True asks for kernel 'flash4', but kernel is"):
        op(q, k, k, *cu_seqlens, use_cute=True, kernel="torch")
    with pytest.raises(ValueError, match="use_cute must be True or False, got 'yes'"):
        op(q, k, k, *cu_seqlens, use_cute="yes")
    assert op(q, k, k, *cu_seqlens, use_cute=False, kernel="torch").shape == q.shape


@pytest.mark.parametrize(("op", "cu_seqlens"), WITH_PROBS)
def test_what_is_not_supported_yet_is_named(op: Any, cu_seqlens: Any) -> None:
    q, k = (PQ, PK) if cu_seqlens else (Q, K)
    said = f"{op.__name__}: return_attn_probs=True is not supported"
    with pytest.raises(NotImplementedError, match=said):
        op(q, k, k, *cu_seqlens, return_attn_probs=True)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([1, 8], "cu_seqlens_q must start at 0, got [1, 8]"),
        ([0, 5, 4, 8], "cu_seqlens_q[2] = 4 is below cu_seqlens_q[1] = 5"),
        ([0, 7], "cu_seqlens_q ends at 7 but there are 8 tokens: [0, 7]"),
        ([0, 9], "cu_seqlens_q ends at 9 but there are 8 tokens"),
        ([], "cu_seqlens_q must be one-dimensional"),
        ([[0, 8]], "cu_seqlens_q must be one-dimensional"),
        ([0.0, 8.0], "cu_seqlens_q must be int32 or int64, got torch.float32"),
    ],
)
def test_varlen_refuses_wrong_cu_seqlens(cu_seqlens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        wrap_ring_attn_varlen_func(PQ, PK, PK, cu_seqlens, cu_seqlens)


@pytest.mark.parametrize("given", ["0, 8", [0, "8"], [[0], [0, 8]], [0, 2**70]], ids=str)
def test_what_is_no_cu_seqlens_at_all_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="wrap_ring_attn_varlen_func: cu_seqlens_k must be inte"):
        wrap_ring_attn_varlen_func(PQ, PK, PK, [0, 8], given)


PACKED_OPS = [wrap_ring_attn_varlen_func, wrap_sliding_window_attn_func]


@pytest.mark.parametrize("op", PACKED_OPS)
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("given", [-1, "x", 8.0, True, 2**63])
def test_a_max_seqlen_is_a_number_of_tokens(op: Any, name: str, given: Any) -> None:
    message = f"{op.__name__}: {name} must be a number of tokens, 0 or more, got {given!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        op(PQ, PK, PK, [0, 8], [0, 8], **{name: given})


@pytest.mark.parametrize("op", PACKED_OPS)
@pytest.mark.parametrize("given", ["no", "", None, 2, np.array([1, 0])], ids=str)
def test_enable_ring_is_a_switch(op: Any, given: Any) -> None:
    message = f"{op.__name__}: enable_ring must be True or False, got {given!r}"
    calls = [lambda: op(PQ, PK, PK, [0, 8], [0, 8], enable_ring=given)]
    if op is wrap_sliding_window_attn_func:
        calls.append(lambda: op(Q, K, K, enable_ring=given))
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_varlen_refuses_documents_that_do_not_pair_up() -> None:
    with pytest.raises(ValueError, match="cu_seqlens_q has 1 documents and cu_seqlens_k 2"):
        wrap_ring_attn_varlen_func(PQ, PK, PK, [0, 8], [0, 4, 8])


def test_varlen_refuses_a_false_max_seqlen() -> None:
    with pytest.raises(ValueError, match="max_seqlen_k=3, but the longest document has 5 tokens"):
        wrap_ring_attn_varlen_func(PQ, PK, PK, [0, 5, 8], [0, 5, 8], max_seqlen_k=3)
    wrap_ring_attn_varlen_func(PQ, PK, PK, [0, 5, 8], [0, 5, 8], max_seqlen_q=5, max_seqlen_k=64)


def test_the_whole_text_of_a_shape_error() -> None:
    with pytest.raises(BindingError) as caught:
        wrap_ring_attn_func(Q, torch.zeros(2, 7, 2, 16), K)
    assert str(caught.value) == (
        "wrap_ring_attn_func: argument 'k' does not fit the annotation\n"
        "    b l (g 2) hd^, b l g hd^, b l g vd^ -> b l (g 2) vd^, b (g 2) l\n"
        "                     ^\n"
        "    dim 1 of k is 'l' = 8 from dim 1 of q, but k has shape (2, 7, 2, 16)\n"
        "    expected: k of shape (2, 8, 2, 16)"
    )


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        ("causal", {}, "mask must be an AttnMask, such as AttnMask.causal(l), got 'causal'"),
        (AttnMask.causal(8).to_dense(), {}, "mask must be an AttnMask"),
        (AttnMask.causal(9), {}, "gives it 9"),
        (AttnMask.causal(8, 9), {}, "holds 8 tokens, but k_layout contiguous:9:1 gives it 9"),
        (AttnMask.causal(8), {"layout": Layout.contiguous(9, 1)}, "but the sequence has 8"),
        (AttnMask.causal(8), {"k_layout": Layout.contiguous(8, 2)}, "k_layout contiguous:8:2 is"),
        (AttnMask.causal(8), {"k_layout": "zigzag"}, "k_layout must be a Layout or None"),
    ],
)
def test_masked_op_refuses(mask: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        masked(Q, K, mask, **options)
    assert str(caught.value).startswith("wrap_masked_attn_func: ")


@pytest.mark.parametrize("rest", [(7, 7), (7, 7, 0.0, None, True)])
def test_arguments_in_flash_attns_order_are_told(rest: tuple[Any, ...]) -> None:
    q, ends = torch.ones(8, 2, 4), torch.tensor([0, 3, 8])
    with pytest.raises(ValueError, match=r"flash-attn's max_seqlen_q and max_seqlen_k go by name"):
        wrap_ring_attn_varlen_func(q, q, q, ends, ends, *rest)


@pytest.mark.parametrize("layout", [None, Layout.zigzag(16, 2)])
def test_lengths_of_the_own_tokens_alone_are_told(layout: Layout | None) -> None:
    def call(comm: Any) -> None:
        q, ends = torch.ones(8, 2, 4), torch.tensor([0, 3, 8])
        wrap_ring_attn_varlen_func(q, q, q, ends, ends, process_group=comm, layout=layout)

    for said in refusals(2, call):
        assert "cumulative lengths of the whole sequence, all ranks' tokens together" in said


@pytest.mark.parametrize(
    ("window", "sink_tokens", "message"),
    [
        (-2, 0, "window (-1: unbounded) must be a number of tokens, 0 or more, got -2"),
        (1.5, 0, "window (-1: unbounded) must be a number of tokens, 0 or more, got 1.5"),
        (True, 0, "window (-1: unbounded) must be a number of tokens, 0 or more, got True"),
        (-1.0, 0, "window (-1: unbounded) must be a number of tokens, 0 or more, got -1.0"),
        (1, False, "sink_tokens must be a number of tokens, 0 or more, got False"),
        (1, -1, "sink_tokens must be a number of tokens, 0 or more, got -1"),
        (1, "2", "sink_tokens must be a number of tokens, 0 or more, got '2'"),
    ],
)
@pytest.mark.parametrize("cu_seqlens", [None, [0, 8]])
def test_streaming_refuses(window: Any, sink_tokens: Any, message: str, cu_seqlens: Any) -> None:
    q, k = (Q, K) if cu_seqlens is None else (PQ, PK)
    with pytest.raises(ValueError, match=re.escape(f"wrap_streaming_attn_func: {message}")):
        wrap_streaming_attn_func(q, k, k, window, sink_tokens, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cu_seqlens_q": [0, 8]}, "cu_seqlens_k is missing; give both"),
        ({"cu_seqlens_k": [0, 8]}, "cu_seqlens_q is missing; give both"),
        ({"window_size": 3}, "window_size must be (left, right)"),
        ({"max_seqlen_q": 8}, "max_seqlen_q goes with cu_seqlens_q and cu_seqlens_k"),
        ({"max_seqlen_k": 0}, "max_seqlen_k goes with cu_seqlens_q and cu_seqlens_k"),
    ],
)
def test_sliding_window_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"wrap_sliding_window_attn_func: {message}")):
        wrap_sliding_window_attn_func(Q, K, K, **given)
