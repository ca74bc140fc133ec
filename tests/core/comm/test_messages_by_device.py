"""Which group carries a message: GPUs' have one of their own, and a group may have CPUs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from customized_ops.ring_attention.core.comm.dist_comm import DistComm


@pytest.mark.parametrize(("device", "group"), [("cpu", "the caller's"), ("meta", "its own")])
def test_messages_go_over_a_group_that_has_their_device(
    device: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "meta" stands for any device but the CPU."""
    sent: list[Any] = []
    monkeypatch.setattr(dist, "P2POp", lambda operation, message, group, group_peer: group)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: sent.extend(ops) or [])
    comm: Any = object.__new__(DistComm)
    comm.rank, comm.size, comm._patience = 0, 2, None
    comm._group, comm._messages = "the caller's", "its own"
    comm.start({1: [torch.empty(3, device=device)]}, {1: [torch.empty(2, device=device)]})
    assert sent == [group] * 2
