"""How often kernels of rows are launched and compiled, and captures of them.

They run on a CUDA device, or on the CPU under Triton's interpreter:

    TRITON_INTERPRET=1 python -m pytest tests/core/merge/test_row_launches.py
"""

from __future__ import annotations

import pytest
import torch

from customized_ops.ring_attention.core.comm.packing.parcels import Parcels, put_all
from customized_ops.ring_attention.core.comm.transfer_side import (
    ROWS,
    STATS,
    TransferSide,
    add,
    merge,
)
from customized_ops.ring_attention.core.merge import merge_
from customized_ops.ring_attention.core.merge.rows import add_rows, copy_rows, on_gpu
from customized_ops.ring_attention.core.plan.exchanges.peer_tokens import PeerTokens, Where

from .row_cases import DEVICE, INTERPRETED, drawn, on_device, results, runs_kernels, some_rows


@runs_kernels
def test_scattered_tokens_of_several_peers_move_in_one_launch(launched):
    """Heads of k and v: packed for messages, written to where they go, added up and merged."""
    dims = ROWS._replace(shares=((0, 2), (2, 6)))
    drawn_rows = [some_rows(40, 13, n).numpy() for n in range(3)]
    first, second, there = (Where(0, 13, (each, each + 1)) for each in drawn_rows)
    k, v = (drawn((1, 40, 6, 64), torch.float32, n) for n in range(2))
    wires = (torch.float16,) * 2
    sent = PeerTokens({1: first, 3: second, 5: first}, team_size=2)
    source = TransferSide(on_device(k, v), [dims] * 2, sent)
    messages = Parcels(source, wires, 0).pack()
    assert launched.count == 1
    # Peers that send it back, to two places and to the same.
    for back, launches in (({1: there}, 1), ({1: there, 3: first}, 1), ({1: there, 5: there}, 1)):
        zeros = [torch.zeros(1, 40, 6, 64, device=DEVICE) for _ in range(2)]
        home = TransferSide(zeros, [dims] * 2, PeerTokens(back, team_size=2))
        into, arrived = Parcels(home, wires, 0).empty(zeros[0])
        for peer, each in into.items():
            each[0].copy_(messages[peer][0])
        before = launched.count
        put_all(add, home, arrived)
        assert launched.count == before + launches
        for total, t in zip(zeros, (k, v), strict=True):
            want = torch.zeros(1, 40, 6, 64)
            for peer, where in back.items():
                carried = t[:, sent[peer].indices, 2:].half().float()
                want[:, where.indices, 2:] += carried
            assert torch.equal(total.cpu(), want)
    lse, part_lse = (torch.zeros(1, n, m, device=DEVICE) for n, m in ((6, 40), (4, 13)))
    part = torch.full((1, 13, 4, 64), 2.0, device=DEVICE)
    zeros[0].zero_()
    results = TransferSide([zeros[0], lse], [dims, STATS._replace(shares=dims.shares)], {1: there})
    before = launched.count
    merge(results.of(1), [part, part_lse])
    assert launched.count == before + 1
    assert (zeros[0][:, there.indices, 2:] == 1.0).all() and not zeros[0][..., :2, :].any()
    assert lse.count_nonzero() == part_lse.numel()


@pytest.mark.gpu
def test_one_variant_for_all_lengths_and_strides(launched):
    """Nothing is compiled again for another length, offset or stride, nor for more batch."""
    if INTERPRETED:
        pytest.skip("interpreted kernels are not compiled")
    for b, length, first, heads in [(1, 64, 0, 8), (1, 1, 3, 8), (2, 99, 16, 8), (1, 513, 1, 8)]:
        out = drawn((b, length + first, heads * 2, 128), torch.bfloat16).cuda()[:, first:, :heads]
        lse = torch.zeros(b, heads * 2, length + first, device="cuda")[:, :heads, first:]
        merge_(out, lse, torch.ones_like(out), torch.zeros_like(lse))
        at = torch.arange(length, device="cuda")
        copy_rows([out, out], [torch.empty_like(out) for _ in range(2)], [1, 1], at)
        if first == 0:
            variants = len(launched._variants)
            caches = [len(c[0]) for c in launched.kernels.merge.device_caches.values()]
    assert len(launched._variants) == variants
    assert [len(c[0]) for c in launched.kernels.merge.device_caches.values()] == caches


@pytest.mark.gpu
def test_more_elements_than_32_bits_count(launched):
    """Row 2^31 / (h d) and beyond, of a tensor of 4 GiB."""
    if INTERPRETED:
        pytest.skip("needs a CUDA device")
    length, h, d = 2**31 // (32 * 128) + 64, 32, 128
    out = torch.zeros(1, length, h, d, dtype=torch.bfloat16, device="cuda")
    lse = torch.zeros(1, h, length, device="cuda")
    rows = torch.arange(length - 16, length, device="cuda")
    part = torch.full((1, 16, h, d), 2.0, dtype=torch.bfloat16, device="cuda")
    merge_(out, lse, part, torch.zeros(1, h, 16, device="cuda"), rows)
    add_rows([part], [out], [1], rows)
    assert launched.count == 2
    copy_rows([out], [part], [1], rows)
    assert (part == 3).all() and not out[:, :-16].any()


@pytest.mark.gpu
def test_captured_in_a_graph(launched):
    if INTERPRETED:
        pytest.skip("needs a CUDA device")
    out, lse = (t.cuda() for t in results(1, 40, 4, 64, torch.bfloat16, 1))
    part, part_lse = (t.cuda() for t in results(1, 9, 4, 64, torch.bfloat16, 5))
    rows = some_rows(40, 9).cuda()
    want, want_lse = out.clone(), lse.clone()
    merge_(want, want_lse, part, part_lse, rows)  # compiles
    add_rows([part], [want], [1], rows)
    taken = torch.empty_like(part)
    copy_rows([want], [taken], [1], rows)
    expected, graph = taken.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_(out, lse, part, part_lse, rows)
        add_rows([part], [out], [1], rows)
        copy_rows([out], [taken], [1], rows)
    taken.zero_()
    graph.replay()
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and torch.equal(taken, expected)


def test_tensors_on_the_cpu_take_torchs_path():
    assert on_gpu(torch.zeros(1, 4, 2, 16)) is None
