"""The process group of what peers' functions call a group or a mesh."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from annotations.groups import GroupError

from ..core.comm.comm_groups import GroupLike


def group_of(title: str, where: GroupLike | DeviceMesh, axes: int = 1) -> GroupLike:
    """What ops take as ``process_group``.

    Args:
        title: the function that was called, for messages.
        where: a DeviceMesh, or what ops take already.
        axes: the most axes that the mesh may have. Of several, all ranks are one group, in
            increasing order, which is made on first use by its members alone.
    Raises:
        GroupError: a mesh of more axes.
    """
    if not isinstance(where, DeviceMesh):
        return where
    if where.ndim > axes:
        names: Sequence[object] = where.mesh_dim_names or range(where.ndim)
        raise GroupError(
            f"{title}: the mesh has {where.ndim} axes, {', '.join(map(str, names))}, and at most "
            f"{axes} fits; pass the one that the sequence is cut over, as mesh[{names[-1]!r}]"
        )
    if where.ndim == 1:
        return where.get_group()
    ranks: list[int] = where.mesh.flatten().tolist()
    return sorted(ranks)
