"""Tables of integers on devices: made once, together, without waiting."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from customized_ops.ring_attention.core.index_table import TAKEN_BYTES, IndexTable, send

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tables() -> list[IndexTable]:
    """Of several shapes and dtypes, one of them empty, one a view that is not dense, one with a
    stride of 0, one by columns."""
    arrays = [
        np.arange(7, dtype=np.int32),
        np.zeros(0, dtype=np.int64),
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.arange(20, dtype=np.int32).reshape(4, 5)[:, 1::2],
        np.arange(6)[None],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
    ]
    return [IndexTable(array) for array in arrays]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("together", [True, False])
def test_each_is_on_the_device_as_it_is_on_the_host(device: str, together: bool) -> None:
    on, some = torch.zeros(0, device=device).device, tables()
    for few in [some] if together else [[table] for table in some]:
        send(few, on)
    for table in some:
        there = table.on(on)
        assert there.device == on and np.array_equal(there.cpu().numpy(), table.values)
        assert there.cpu().numpy().dtype == table.values.dtype
        assert table.on(on) is there


@pytest.mark.gpu
@pytest.mark.parametrize("more", [0, TAKEN_BYTES], ids=["small", "large"])
def test_they_share_a_buffer_and_the_host_waits_for_nothing(more: int) -> None:
    device = torch.device("cuda", 0)
    some = [*tables(), IndexTable(np.arange(more))]
    other, busy = torch.cuda.Stream(device), torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1 << 30)  # clock cycles
        busy.record()
        send(some, device)
        send(some, device)
        assert not busy.query()
        alone = [table.on(device) for table in (*tables(), IndexTable(np.arange(9)))]
        with torch.cuda.stream(other):
            sums = [table.on(device).sum() for table in some]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len({table.on(device).untyped_storage().data_ptr() for table in some}) == 1
    # Libraries compile a kernel for strides of 0, which tables of pickled plans do not have.
    every = [*alone, *(table.on(device) for table in some)]
    assert all(t.is_contiguous() and 0 not in t.stride() for t in every if t.numel())
    torch.cuda.synchronize()
    assert [int(n) for n in sums] == [int(table.values.sum()) for table in some]
    assert alone[-1].tolist() == list(range(9))


@pytest.mark.gpu
def test_a_cuda_graph_reads_tables_that_another_stream_was_sent_and_keeps_them() -> None:
    device, some = torch.device("cuda", 0), tables()
    send(some, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # on a stream of its own
        sums = [table.on(device).sum() for table in some]
    wanted = [int(table.values.sum()) for table in some]
    n_bytes = some[0].on(device).untyped_storage().nbytes()
    del some
    others = [torch.full((n_bytes,), 99, dtype=torch.uint8, device=device) for _ in range(9)]
    graph.replay()
    assert [int(n) for n in sums] == wanted
    del others


@pytest.mark.gpu
def test_a_table_is_not_sent_while_a_cuda_graph_is_captured() -> None:
    device, graph = torch.device("cuda", 0), torch.cuda.CUDAGraph()
    seed = torch.zeros(1, device=device)
    with (
        pytest.raises(RuntimeError, match="before a CUDA graph is captured; run two steps"),
        torch.cuda.graph(graph),
    ):
        seed += 1
        tables()[0].on(device)


def test_a_pickled_table_leaves_its_copies_behind() -> None:
    table = tables()[2]
    table.on(torch.device("cpu"))
    again = pickle.loads(pickle.dumps(table))
    assert np.array_equal(again.values, table.values) and not again._on
