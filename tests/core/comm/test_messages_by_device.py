"""Which group carries a message: GPUs' have one of their own, and a group may have CPUs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from customized_ops.ring_attention.core.comm import dist_comm
from customized_ops.ring_attention.core.comm.dist_comm import DistComm, Way


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        ("cpu", [("the caller's", peer) for peer in (0, 1, 2) * 2]),
        ("meta", [("near", 0)] * 2 + [("far", peer) for peer in (0, 1) * 2]),
    ],
)
def test_messages_go_over_a_group_that_has_their_device(
    device: str, wanted: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "meta" stands for any device but the CPU. Those inside a host, whose group starts with its
    first rank, do not wait for others."""
    sent: list[tuple[str, int]] = []
    monkeypatch.setattr(dist, "P2POp", lambda op, message, group, group_peer: (group, group_peer))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: sent.extend(ops) or [])
    comm: Any = object.__new__(DistComm)
    comm.rank, comm.size = 3, 4
    comm._patience = comm._stamps = comm._device = None
    comm._of_cpus = [Way("the caller's", frozenset(range(4)))]  # type: ignore[arg-type]
    near, far = Way("near", frozenset({2, 3}), 2), Way("far", frozenset({0, 1}))  # type: ignore[arg-type]
    comm._of_gpus = [near, far]
    messages = {peer: [torch.empty(3, device=device)] for peer in (1, 0, 2)}
    comm.start(messages, messages)
    assert sent == wanted


@pytest.mark.parametrize(
    ("ranks", "peer", "told"),
    [(2, None, ""), (2, "ImportError: no triton", "no triton"), (64, None, "64 ranks; flags are")],
)
def test_gpus_that_cannot_compare_passes_send_them_all_the_same(
    ranks: int, peer: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a group, or none: else some would send a number that others do not expect."""
    comm: Any = object.__new__(DistComm)
    comm.rank, comm.size, comm.name = 0, ranks, "the group"
    comm._group, comm._patience = None, object()
    comm.all_gather_object = lambda problem: [problem, peer]
    if ranks <= 63:
        monkeypatch.setattr(dist_comm, "Stamps", lambda *given: "stamps")
    if not told:
        assert comm._made_stamps(torch.device("cpu"), print) == "stamps"
        return
    with pytest.warns(UserWarning, match=f"GPUs of the group 'the group' do not compare .*{told}"):
        assert comm._made_stamps(torch.device("cpu"), print) is None
