"""The ranks of a run as device meshes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_meshes: dict[Any, tuple[Any, DeviceMesh]] = {}


def axis_names(shape: tuple[int, ...]) -> tuple[str, ...]:
    """Names of the axes of a mesh of one copy's ranks."""
    return tuple(f"axis{n}" for n in range(len(shape)))


def mesh_of_copies(device_type: str, copies: int, shape: tuple[int, ...]) -> DeviceMesh:
    """All ranks: along ``"copy"`` the copies of a model, along the other axes the ranks of a copy.

    Every rank of the run calls this. A mesh is made once: DTensor's caches take equal meshes for
    the same one, so with several, ranks could end up in different ones and wait forever.
    """
    key, world = (device_type, copies, shape), dist.group.WORLD
    if key not in _meshes or _meshes[key][0] is not world:
        names = ("copy", *axis_names(shape))
        _meshes[key] = world, init_device_mesh(device_type, (copies, *shape), mesh_dim_names=names)
    return _meshes[key][1]
