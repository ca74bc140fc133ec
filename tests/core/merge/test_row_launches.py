"""How often kernels of rows are launched and compiled, and captures of them.

They run on a CUDA device, or on the CPU under Triton's interpreter:

    TRITON_INTERPRET=1 python -m pytest tests/core/merge/test_row_launches.py
"""

from __future__ import annotations

import pytest
import torch
from dense import assert_same

from customized_ops.ring_attention.core.comm.transfer_side import (
    ROWS,
    STATS,
    TransferSide,
    add,
    copy,
    merge,
    place,
)
from customized_ops.ring_attention.core.merge import merge_
from customized_ops.ring_attention.core.merge.rows import add_rows, copy_rows, on_gpu
from customized_ops.ring_attention.core.plan.exchanges.exchange import Where

from .row_cases import DEVICE, INTERPRETED, drawn, on_device, results, runs_kernels, some_rows


@runs_kernels
def test_scattered_tokens_of_a_peer_move_in_one_launch(launched):
    """Heads of k and v: packed for a message, written to where they go, added up and merged."""
    dims = ROWS._replace(shares=((0, 2), (2, 6)))
    rows = [some_rows(40, 13, n).numpy() for n in range(2)]
    here, there = (Where(0, 13, (each, each + 1)) for each in rows)
    k, v = (drawn((1, 40, 6, 64), torch.float32, n) for n in range(2))
    source = TransferSide(on_device(k, v), [dims] * 2, {1: here})
    wires = (torch.float16,) * 2
    (message,) = source.messages(wires, but=0)[1]
    parts = message.view(2, 1, 13, 4, 64).unbind()
    assert launched.count == 1
    for part, t in zip(parts, (k, v), strict=True):
        assert part.is_contiguous() and torch.equal(part.cpu(), t[:, here.indices, 2:].half())
    zeros = [torch.zeros(1, 40, 6, 64, device=DEVICE) for _ in range(2)]
    target = TransferSide(zeros, [dims] * 2, {1: there})
    copy(source.of(1), target.of(1))
    add(target.of(1), parts)
    assert launched.count == 3
    for total, t in zip(zeros, (k, v), strict=True):
        want = t[:, here.indices, 2:] + t[:, here.indices, 2:].half()
        assert torch.equal(total[:, there.indices, 2:].cpu(), want)
        assert total.count_nonzero() == want.count_nonzero()
    place(target.of(1), parts)
    assert torch.equal(zeros[0][:, there.indices, 2:], parts[0].float())
    lse, part_lse = (torch.zeros(1, n, m, device=DEVICE) for n, m in ((6, 40), (4, 13)))
    results = TransferSide([zeros[0], lse], [dims, STATS._replace(shares=dims.shares)], {1: there})
    merge(results.of(1), [parts[1], part_lse])
    assert launched.count == 5
    want = (parts[0].float() + parts[1].float()) / 2
    assert_same("merged", zeros[0][:, there.indices, 2:], want, 1e-5)
    assert not zeros[0][..., :2, :].any() and lse.count_nonzero() == part_lse.numel()


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
