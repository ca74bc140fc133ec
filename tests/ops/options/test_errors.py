"""What a wrong call says, before anything is computed or sent."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import op_jobs
import pytest
import torch
from ranks import Pool

from annotations import BindingError
from customized_ops.ring_attention import (
    AttnMask,
    KernelError,
    Layout,
    wrap_masked_attn_func,
    wrap_ring_attn_func,
    wrap_ring_attn_varlen_func,
    wrap_sliding_window_attn_func,
    wrap_streaming_attn_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.kernels import KERNELS

Q, K = torch.zeros(2, 8, 4, 16), torch.zeros(2, 8, 2, 16)
PQ, PK = torch.zeros(8, 4, 16), torch.zeros(8, 2, 16)
SLOPES, BF16 = torch.ones(4), torch.bfloat16


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


UNSUPPORTED = [
    (wrap_ring_attn_func, (), "return_attn_probs"),
    (wrap_zigzag_attn_func, (), "return_attn_probs"),
    (wrap_sliding_window_attn_func, (), "return_attn_probs"),
    (wrap_sliding_window_attn_func, ([0, 8], [0, 8]), "return_attn_probs"),
    (wrap_ring_attn_varlen_func, ([0, 8], [0, 8]), "return_attn_probs"),
]
CUTE = [
    (wrap_sliding_window_attn_func, ()),
    (wrap_sliding_window_attn_func, ([0, 8], [0, 8])),
    (wrap_ring_attn_varlen_func, ([0, 8], [0, 8])),
]


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


@pytest.mark.parametrize(("op", "cu_seqlens", "name"), UNSUPPORTED)
def test_what_is_not_supported_yet_is_named(op: Any, cu_seqlens: Any, name: str) -> None:
    q, k = (PQ, PK) if cu_seqlens else (Q, K)
    with pytest.raises(NotImplementedError, match=f"{op.__name__}: {name}=True is not supported"):
        op(q, k, k, *cu_seqlens, **{name: True})


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


def said_by_ranks(ranks: int, call: Any) -> list[str]:
    """What each of ``ranks`` in-process ranks says to ``call(comm)``."""

    def body(comm: Any) -> str:
        try:
            call(comm)
        except (ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    return run_ranks(ranks, body)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.zeros(2, 8, 3, 16)}, "q has 4 heads and k has 3"),
        ({"k": torch.zeros(2, 7, 2, 16)}, "dim 1 of k is 'l' = 8"),
        ({"v": torch.zeros(2, 9, 2, 16)}, "dim 1 of v is 'l' = 8"),
        ({"k": K.double()}, "k is torch.float64 but q is torch.float32"),
        ({"return_attn_probs": True}, "return_attn_probs=True is not supported yet"),
        ({"layout": Layout.contiguous(9, 3)}, "holds 8 tokens, but layout contiguous:9:3 gives it"),
        ({"layout": Layout.contiguous(16, 2)}, "is for 2 ranks, but the group has 3"),
    ],
)
@pytest.mark.parametrize("checking", [True, False])
def test_a_call_wrong_on_all_ranks_is_refused_by_all_before_anything_is_sent(
    checking: bool, changed: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQSHARD_CHECK", str(int(checking)))

    def call(comm: Any) -> None:
        monkeypatch.setattr(comm, "start", None)  # nothing may be sent
        wrap_ring_attn_func(**{"q": Q, "k": K, "v": K, "process_group": comm, **changed})

    said = said_by_ranks(3, call)
    assert all(message in text for text in said)
    assert len({re.sub(r"rank \d", "rank r", text) for text in said}) == 1


def test_a_layout_for_other_sizes_is_refused_on_every_rank() -> None:
    def call(comm: Any) -> None:
        wrap_ring_attn_func(Q, K, K, process_group=comm, layout=Layout.from_sizes([8, 8, 7]))

    first, second, third = said_by_ranks(3, call)
    assert "rank 2 of 3 holds 8 tokens, but layout sizes:8,8,7 gives it 7" in third
    assert first == second
    assert "refused on another rank of the group\nrank 2: wrap_ring_attn_func: rank 2" in first


def test_ranks_that_disagree_all_get_the_same_table() -> None:
    def call(comm: Any) -> None:
        window = (3, 0) if comm.rank == 1 else (-1, -1)
        wrap_ring_attn_func(Q, K, K, process_group=comm, window_size=window)

    said = said_by_ranks(3, call)
    assert len(set(said)) == 1
    lines = said[0].splitlines()
    assert lines[0] == (
        "DisagreementError: wrap_ring_attn_func: the ranks of the group do not agree"
    )
    assert lines[1].split() == ["rank", "mask"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2"]
    assert lines[2].split("24x24")[1] == lines[4].split("24x24")[1] != lines[3].split("24x24")[1]


def test_equal_layouts_agree_whatever_they_are_called() -> None:
    def call(comm: Any) -> None:
        ranges = [[(0, 8)], [(8, 16)]]
        layout = Layout.from_ranges(ranges) if comm.rank else Layout.contiguous(16, 2)
        wrap_ring_attn_func(Q, K, K, process_group=comm, layout=layout)

    assert said_by_ranks(2, call) == ["no error"] * 2


def test_layouts_that_differ_far_behind_do_not_agree() -> None:
    """Where their names, as messages have them, are the same."""

    def call(comm: Any) -> None:
        own = [(n, n + 1) for n in range(0, 96, 2)]
        rest = [(n, n + 1) for n in range(1, 96, 2)]
        if comm.rank:
            own[-1], rest[-1] = rest[-1], own[-1]
        q = torch.zeros(1, 48, 1, 4)
        wrap_ring_attn_func(q, q, q, process_group=comm, layout=Layout.from_ranges([own, rest]))

    first, second = said_by_ranks(2, call)
    assert first == second
    _, head, *rows = first.splitlines()[:4]
    assert head.split() == ["rank", "layout"]
    names = [re.sub("^  .  | #.*", "", row) for row in rows]
    assert names[0] == names[1] and "..." in names[0] and rows[0][3:] != rows[1][3:]


@pytest.mark.parametrize("said", [False, True])
def test_only_who_gave_no_layout_is_told_of_it(said: bool) -> None:
    def call(comm: Any) -> None:
        sizes = [8, 8] if comm.rank else [8, 9]
        q = torch.zeros(1, 8, 1, 4) if said or comm.rank else torch.zeros(1, 9, 1, 4)
        layout = Layout.from_sizes(sizes) if said else None
        wrap_ring_attn_func(q, q, q, process_group=comm, layout=layout)

    told = [each for each in said_by_ranks(2, call) if "do not agree" in each]
    assert told
    assert all(("without layout= each rank takes" in each) != said for each in told)


def test_seeds_of_their_own_say_where_they_are_from() -> None:
    def call(comm: Any) -> None:
        wrap_ring_attn_func(Q, K, K, process_group=comm, dropout_p=0.5, dropout_seed=comm.rank)

    for told in said_by_ranks(2, call):
        assert told.splitlines()[1].split() == ["rank", "dropout_seed"]
        assert told.endswith("seed that alike on all ranks, or pass dropout_seed=")


DIFFERENT_HEADS = """\
DisagreementError: wrap_ring_attn_func: the ranks of the group do not agree
  rank  q_heads
  0     part 0 of 2 of 4 heads
  1     part 1 of 2 of 4 heads"""


def test_parts_of_the_heads_that_differ(two_ranks: Pool) -> None:
    """Without the check the ranks would exchange keys of different heads: wrong, with no error."""
    assert two_ranks.run(op_jobs.heads_by_rank) == [DIFFERENT_HEADS] * 2


def test_an_unsupported_argument_on_one_rank_stops_all() -> None:
    def call(comm: Any) -> None:
        wrap_zigzag_attn_func(Q, K, K, process_group=comm, return_attn_probs=comm.rank == 1)

    first, second = said_by_ranks(2, call)
    assert second.startswith("NotImplementedError: wrap_zigzag_attn_func: return_attn_probs=True")
    assert "rank 1: wrap_zigzag_attn_func: return_attn_probs=True is not supported yet" in first


def test_different_cu_seqlens_stop_all() -> None:
    def call(comm: Any) -> None:
        cu = [0, 16] if comm.rank else [0, 4, 16]
        wrap_ring_attn_varlen_func(PQ, PK, PK, cu, cu, causal=True, process_group=comm)

    first, second = said_by_ranks(2, call)
    assert first == second
    assert "do not agree" in first


WRONG_ON_ONE_RANK: dict[str, tuple[Any, str]] = {
    "a cu_seqlens is missing": (
        lambda wrong: (
            lambda comm: wrap_sliding_window_attn_func(
                PQ, PK, PK, [0, 16], None if wrong else [0, 16], process_group=comm
            )
        ),
        "wrap_sliding_window_attn_func: cu_seqlens_k is missing",
    ),
    "both cu_seqlens are missing from a packed op": (
        lambda wrong: (
            lambda comm: wrap_ring_attn_varlen_func(
                PQ, PK, PK, *[None if wrong else [0, 16]] * 2, process_group=comm
            )
        ),
        "wrap_ring_attn_varlen_func: cu_seqlens_q is missing",
    ),
    "max_seqlen without cu_seqlens": (
        lambda wrong: (
            lambda comm: wrap_sliding_window_attn_func(
                Q, K, K, max_seqlen_q=8 if wrong else None, process_group=comm
            )
        ),
        "wrap_sliding_window_attn_func: max_seqlen_q goes with cu_seqlens_q and cu_seqlens_k",
    ),
    "enable_ring of a dense op": (
        lambda wrong: (
            lambda comm: wrap_sliding_window_attn_func(
                Q, K, K, enable_ring=[] if wrong else True, process_group=comm
            )
        ),
        "wrap_sliding_window_attn_func: enable_ring must be True or False, got []",
    ),
    "enable_ring of a packed op": (
        lambda wrong: (
            lambda comm: wrap_ring_attn_varlen_func(
                PQ,
                PK,
                PK,
                [0, 16],
                [0, 16],
                enable_ring=None if wrong else True,
                process_group=comm,
            )
        ),
        "wrap_ring_attn_varlen_func: enable_ring must be True or False, got None",
    ),
    "window": (
        lambda wrong: (
            lambda comm: wrap_streaming_attn_func(
                Q, K, K, -2 if wrong else 2, 1, process_group=comm
            )
        ),
        "wrap_streaming_attn_func: window (-1: unbounded) must be a number of tokens",
    ),
    "kernel": (
        lambda wrong: (
            lambda comm: wrap_ring_attn_func(
                Q, K, K, kernel=None if wrong else "auto", process_group=comm
            )
        ),
        "wrap_ring_attn_func: kernel must be the name of one, or 'auto', got None",
    ),
}


@pytest.mark.parametrize("name", WRONG_ON_ONE_RANK)
def test_an_argument_wrong_on_one_rank_stops_all_in_check_mode(name: str) -> None:
    calling, message = WRONG_ON_ONE_RANK[name]
    first, second = said_by_ranks(2, lambda comm: calling(comm.rank == 1)(comm))
    assert second.startswith(f"ArgumentError: {message}")
    assert first.startswith("DisagreementError") and f"rank 1: {message}" in first


@pytest.mark.parametrize(
    ("said", "compares", "asked"),
    [(None, False, False), (None, True, True), ("0", True, False), ("1", False, True)],
)
def test_who_compares_calls(
    said: str | None, compares: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks on CPUs, unless they are told not to."""
    if said is None:
        monkeypatch.delenv("SEQSHARD_CHECK")
    else:
        monkeypatch.setenv("SEQSHARD_CHECK", said)
    gathered = []

    def call(comm: Any) -> None:
        comm.compares, gather = compares, comm.all_gather_object
        comm.all_gather_object = lambda told: gathered.append(told) or gather(told)
        wrap_ring_attn_func(Q, K, K, process_group=comm, layout=Layout.contiguous(16, 2))

    assert said_by_ranks(2, call) == ["no error", "no error"]
    assert bool(gathered) == asked


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"softmax_scale": "x"}, "softmax_scale must be a number or None, got 'x'"),
        ({"layout": "contiguous:16:2"}, "layout must be a Layout or None"),
        ({"k": None}, "k must be a tensor, got NoneType"),
        ({"window_size": 3}, "window_size must be (left, right)"),
    ],
)
def test_anything_wrong_on_one_rank_stops_all(changed: dict[str, Any], message: str) -> None:
    def call(comm: Any) -> None:
        given = {"q": Q, "k": K, "v": K, **(changed if comm.rank else {})}
        wrap_ring_attn_func(**given, process_group=comm)

    first, second = said_by_ranks(2, call)
    assert message in second
    assert message in first
    assert first.startswith("DisagreementError")


def test_a_layout_is_refused_where_q_and_k_differ_in_total() -> None:
    layout, cu, cu_k = Layout.contiguous(8, 1), [0, 8], [0, 6]
    with pytest.raises(ValueError, match=r"is for q, but cu_seqlens_q end at 8 and .* at 6"):
        wrap_ring_attn_varlen_func(PQ, PK[:6], PK[:6], cu, cu_k, layout=layout)
    both = {"layout": layout, "k_layout": Layout.contiguous(6, 1)}
    wrap_ring_attn_varlen_func(PQ, PK[:6], PK[:6], cu, cu_k, **both)


def masked(q: torch.Tensor, k: torch.Tensor, mask: Any, **options: Any) -> None:
    wrap_masked_attn_func(q, k, k, mask, **options)


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
    def body(comm: Any) -> str:
        q, ends = torch.ones(8, 2, 4), torch.tensor([0, 3, 8])
        with pytest.raises(ValueError) as caught:
            wrap_ring_attn_varlen_func(q, q, q, ends, ends, process_group=comm, layout=layout)
        return str(caught.value)

    for said in run_ranks(2, body):
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


@pytest.mark.parametrize(
    ("column", "others"),
    [
        ("softcap", lambda rank: {"softcap": float(rank)}),
        ("softmax_scale", lambda rank: {"softmax_scale": 1.0 + rank}),
        ("dropout_seed", lambda rank: {"dropout_p": 0.5, "dropout_seed": rank}),
        ("dropout_p", lambda rank: {"dropout_p": 0.2 + 0.1 * rank, "dropout_seed": 1}),
        ("sink", lambda rank: {"sink": torch.zeros(4) if rank else None}),
        ("sink", lambda rank: {"sink": torch.zeros(4, dtype=[torch.float, torch.double][rank])}),
        ("alibi_slopes", lambda rank: {"alibi_slopes": torch.ones(*[2] * rank, 4)}),
        ("alibi_slopes", lambda rank: {"alibi_slopes": torch.ones(4) * (1 + rank)}),
        ("alibi_slopes", lambda rank: {"alibi_slopes": SLOPES.to([torch.float, BF16][rank])}),
        ("return_lse", lambda rank: {"return_lse": rank == 1}),
        ("kernel", lambda rank: {"kernel": "reference" if rank else "torch"}),
        ("deterministic", lambda rank: {"deterministic": rank == 1}),
        ("reduce_dtype", lambda rank: {"reduce_dtype": [None, BF16][rank]}),
        ("team_size", lambda rank: {"team_size": 1 + rank}),
        ("mask", lambda rank: {"mask": AttnMask.prefix_lm(16, 3 + rank)}),
        ("layout", lambda rank: {"layout": [Layout.zigzag, Layout.contiguous][rank](16, 2)}),
        ("k", lambda rank: {"k": K[:, :, : rank + 1]}),
        ("dtype", lambda rank: {"q": [Q, Q.double()][rank], "k": [K, K.double()][rank]}),
    ],
)
def test_whatever_ranks_disagree_on_is_in_the_table(column: str, others: Any) -> None:
    def call(comm: Any) -> None:
        comm.start = None  # nothing may be sent
        given = {"q": Q, "k": K, "mask": AttnMask.prefix_lm(16, 3), **others(comm.rank)}
        masked(**given, process_group=comm)

    first, second = said_by_ranks(2, call)
    assert first == second
    lines = first.splitlines()
    problem = "DisagreementError: wrap_masked_attn_func: the ranks of the group do not agree"
    assert lines[0] == problem
    assert lines[1].split()[0] == "rank" and column in lines[1].split()
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert lines[2].split()[1:] != lines[3].split()[1:]


def test_a_sink_of_another_shape_on_one_rank_stops_all() -> None:
    def call(comm: Any) -> None:
        wrap_ring_attn_func(Q, K, K, process_group=comm, sink=torch.zeros(4 + comm.rank))

    first, second = said_by_ranks(2, call)
    assert second.startswith("ArgumentError: wrap_ring_attn_func: sink must hold a logit for each")
    assert "refused on another rank of the group\nrank 1: wrap_ring_attn_func: sink must" in first
