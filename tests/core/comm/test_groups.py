import pytest
import torch.distributed as dist

from annotations import group_named
from annotations.groups import GroupError
from customized_ops.ring_attention.core.comm.comm_groups import (
    ALONE,
    FakeComm,
    comm_by_name,
    group_costs,
    group_name,
)
from customized_ops.ring_attention.core.comm.inprocess import run_ranks
from customized_ops.ring_attention.core.topology import Topology

WHAT_IT_MUST_BE = (
    "process_group must be a torch.distributed.ProcessGroup, a sequence of global ranks, or None, "
)


@pytest.fixture(autouse=True)
def no_default_group():
    assert not dist.is_initialized()


@pytest.mark.parametrize("process_group", [None, [0], (3,), ALONE])
def test_one_rank_is_no_group(process_group):
    assert group_name(process_group) == ""


@pytest.mark.parametrize(
    ("process_group", "message"),
    [
        ([0, 1], "process_group=(0, 1), but torch.distributed is not initialised"),
        (range(2, 8, 2), "process_group=(2, 4, 6), but torch.distributed is not initialised"),
        ([1, 0], "process_group must list global ranks in increasing order, got (1, 0)"),
        ([0, 0], "process_group must list global ranks in increasing order, got (0, 0)"),
        ([], "process_group must list global ranks in increasing order, got ()"),
        (4, WHAT_IT_MUST_BE + "got 4"),
        ("dp", WHAT_IT_MUST_BE + "got 'dp'"),
        ([None], WHAT_IT_MUST_BE + "got [None]"),
    ],
)
def test_group_errors(process_group, message):
    with pytest.raises(GroupError) as info:
        group_name(process_group)
    assert str(info.value) == message
    assert isinstance(info.value, ValueError)


def test_alone():
    assert comm_by_name("") is ALONE
    assert (ALONE.rank, ALONE.size, ALONE.name) == (0, 1, "")
    assert ALONE.all_gather_object("x") == ["x"]
    ALONE.start({}, {})()


def test_hosts_of_groups_that_are_no_processes():
    """One rank is on one host, and so are ranks of one process."""
    assert group_costs(None, "1x1") == group_costs(None)
    assert group_costs(FakeComm(0, 2), Topology((2,))) == group_costs(FakeComm(0, 2))
    with pytest.raises(ValueError, match="hosts=2x1: the ranks of 'fake:0:2' are in one process"):
        group_costs(FakeComm(0, 2), "2x1")
    with pytest.raises(ValueError, match="hosts=2x1 has 2 ranks, the group 1"):
        group_costs(None, "2x1")
    for hosts in (8, [2, 2]):
        with pytest.raises(TypeError, match="hosts must be given as 8x4 or 4,4,2, or as a Topo"):
            group_costs(None, hosts)


def test_an_unknown_name():
    with pytest.raises((RuntimeError, ValueError), match="no such group"):
        comm_by_name("no such group")


def test_in_process_groups_are_found_by_name():
    def body(comm):
        return comm_by_name(group_name(comm)) is comm

    assert run_ranks(3, body) == [True] * 3
    assert run_ranks(1, group_name) == [""]


def test_a_name_of_no_group():
    with pytest.raises(GroupError) as info:
        group_named("nobody")
    assert str(info.value) == "no process group is named 'nobody'"
