"""Groups that are not the world, several at the same time, meshes, and teams that split heads:
on GPUs over NCCL and over symmetric memory, and on CPUs over gloo."""

from __future__ import annotations

from collections.abc import Sequence

import group_jobs
import kernel_jobs
import mesh_jobs
import pytest
from dense import assert_same
from op_cases import Case
from op_table import TABLE
from rank_groups import Groups, Rows, columns_of, comms, device_of, rows_of, whole
from ranks import Pool, worlds
from verdicts import Named, check, lows, on

NAMES = ("causal", "zigzag odd, grouped", "packed grouped", "masked prefix")
HEADS = {
    "fewer key heads": Case("ring", 26, heads=(8, 2)),
    "zigzag": Case("zigzag", 37, heads=(8, 2), layout="zigzag"),
    "uneven": Case("ring", 26, heads=(6, 3), batch=2),
    "one key head": Case("ring", 26, heads=(5, 1), alibi=True, dropout=0.3, sink=True),
    "five": Case("varlen", heads=(5, 5), cu_seqlens=(0, 7, 26, 41), length=41),
    "eleven": Case("ring", 29, heads=(11, 1), window=(9, 0), sink=True),
}


def connected(ranks: Pool, rows: Rows, purpose: str = "") -> list[Groups]:
    """The same groups in every way that they may be connected."""
    return [Groups(rows, comm, purpose) for comm in comms(ranks)]


def cases_of_rows(count: int) -> list[Named]:
    """Other cases in each row, and fewer from row to row."""
    table = {name: TABLE[name] for name in NAMES}
    turned = [NAMES[n:] + NAMES[:n] for n in range(count)]
    return [{name: table[name] for name in names[: 4 - n]} for n, names in enumerate(turned)]


@pytest.mark.parametrize("members", [(1, 2), (0, 2), (1, 2, 3)])
@worlds(cpus=[4, 8], gpus=[4, 8])
def test_groups_that_are_not_the_world(ranks: Pool, members: tuple[int, ...]) -> None:
    """Told as ranks, of whom the others know nothing, and as a ProcessGroup."""
    cases = on(device_of(ranks), {name: TABLE[name] for name in NAMES})
    check(ranks, [cases], [Groups((members,), "ranks"), *connected(ranks, (members,))])


@worlds(cpus=[3], gpus=[])
def test_a_group_of_others_is_refused_by_name(ranks: Pool) -> None:
    for rank, message in enumerate(ranks.run(group_jobs.outside)):
        others = tuple(n for n in range(ranks.size) if n != rank)
        assert f"global rank {rank} is not a member of process_group" in message
        assert f"the last group made without this rank has global ranks {others}" in message
        assert "pass a group, or global ranks in increasing order, with this rank in it" in message


@pytest.mark.parametrize(
    ("members", "hosts"),
    [((0, 1, 2, 3), "2x2"), ((1, 2, 3), "2,2"), ((0, 1, 3), "3,1"), ((0, 3), "2x2")],
)
@worlds(cpus=[4], gpus=[])
def test_messages_inside_hosts_and_between(
    ranks: Pool, members: tuple[int, ...], hosts: str
) -> None:
    """Each goes to its peer, by one group; also where the group does not start with the world."""
    found = ranks.run(group_jobs.messages_apart, members, hosts)
    for n, member in enumerate(members):
        carried, came = found[member]
        peers = [peer for peer in range(len(members)) if peer != n]
        assert sorted(carried) == peers
        assert came == [10 * peer + n for peer in peers]


def side_by_side(size: int) -> list[Rows]:
    """Ways to deal all ranks out to several groups, and one with groups of other sizes."""
    meshes = [
        form(size, width) for width in (2, 4) if width < size for form in (rows_of, columns_of)
    ]
    return [*meshes, ((0, size - 1), tuple(range(1, size - 1)))]


@worlds(cpus=[4, 8], gpus=[4, 8])
def test_groups_side_by_side(ranks: Pool) -> None:
    """Each does something else; whoever comes late makes the others of its group wait alone."""
    for n, rows in enumerate(side_by_side(ranks.size)):
        cases = [on(device_of(ranks), row) for row in cases_of_rows(len(rows))]
        ways = [Groups(rows, "ranks"), *connected(ranks, rows)]
        job = kernel_jobs.in_step_with_nobody
        check(ranks, cases, ways, n % ranks.size, job=job)


@worlds(cpus=[4, 8], gpus=[4, 8])
def test_groups_side_by_side_in_bf16(ranks: Pool) -> None:
    """By kernels that do not make the host wait, so that passes of two groups overlap."""
    rows = rows_of(ranks.size, ranks.size // 2)
    cases = [lows(row, device_of(ranks)) for row in cases_of_rows(2)]
    check(ranks, cases, connected(ranks, rows), 0, job=kernel_jobs.in_step_with_nobody)


@pytest.mark.parametrize("late", [0, 3])
@worlds(cpus=[4, 8], gpus=[4, 8])
def test_batches_times_sequences(ranks: Pool, late: int) -> None:
    """Rows of a mesh attend batches of their own; weights' gradients are added up over it all."""
    shapes = {(2, ranks.size // 2), (ranks.size // 2, 2)}
    for shape in sorted(shapes):
        wanted, want = mesh_jobs.alone(shape[0])
        for rank, (outs, grads) in enumerate(ranks.run(mesh_jobs.on_a_mesh, shape, late)):
            row, place = divmod(rank, shape[1])
            for step, out in enumerate(outs):
                layout = mesh_jobs.layout_of(row, shape[1])
                mine = layout.shard(wanted[row][step], place)
                assert_same(f"{shape}, rank {rank}, step {step}", out, mine)
            for name, grad in grads.items():
                assert grad.abs().max() > 1e-6
                assert_same(f"{shape}, rank {rank}, {name}", grad, want[name])


def teams(size: int) -> Sequence[tuple[Rows, int]]:
    """Groups, and in how many ways they split heads: all, half, or three."""
    some = tuple(range(1, 4))
    return [
        (whole(size), size),
        (whole(size), size // 2),
        (rows_of(size, size // 2), 2),
        ((some,), 3),
    ]


@pytest.mark.thin(2)
@pytest.mark.parametrize("which", range(4))
@worlds(cpus=[4, 8], gpus=[4, 8])
def test_heads_in_uneven_shares(ranks: Pool, which: int) -> None:
    """Ranks of a team share out the heads, teams the sequence; and more ranks than key heads."""
    rows, team_size = teams(ranks.size)[which]
    cases = {name: case for name, case in HEADS.items() if case.heads[0] >= team_size}
    assert "fewer key heads" in cases
    ways = connected(ranks, rows, f"teams of {team_size}")
    check(
        ranks, [on(device_of(ranks), cases)] * len(rows), ways, team_size, job=kernel_jobs.in_teams
    )


@pytest.mark.thin(4)
@pytest.mark.parametrize("which", range(4))
@worlds(cpus=[4, 8], gpus=[4, 8])
def test_heads_in_bf16(ranks: Pool, which: int) -> None:
    rows, team_size = teams(ranks.size)[which]
    longer = {"longer": Case("ring", 512), "zigzag": HEADS["zigzag"]}
    ways = connected(ranks, rows, f"teams of {team_size}")
    cases = [lows(longer, device_of(ranks))] * len(rows)
    check(ranks, cases, ways, team_size, job=kernel_jobs.in_teams)


GROUPED = {
    "causal": Case("ring", 26, heads=(8, 4)),
    "zigzag": Case("zigzag", 37, heads=(4, 4), layout="zigzag"),
    "uneven": Case("ring", 29, heads=(6, 3), batch=2, window=(9, 0)),
    "packed": Case("varlen", heads=(6, 6), cu_seqlens=(0, 7, 26, 41), length=41),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("head_groups", [2, 3])
@worlds(cpus=[4, 8], gpus=[2, 4, 8])
def test_keys_in_groups_of_heads(ranks: Pool, head_groups: int) -> None:
    """The first group is attended, and its gradients go home, while the next arrives."""
    rows, purpose = whole(ranks.size), f"{head_groups} groups of heads"
    cases = [on(device_of(ranks), GROUPED)]
    check(
        ranks, cases, connected(ranks, rows, purpose), head_groups, job=kernel_jobs.in_head_groups
    )
    longer = {"longer": Case("ring", 512), "zigzag": GROUPED["zigzag"]}
    cases = [lows(longer, device_of(ranks))]
    ways = connected(ranks, rows, f"{purpose}, low")
    check(ranks, cases, ways, 2, job=kernel_jobs.in_head_groups)
