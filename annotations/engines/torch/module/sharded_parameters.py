"""The parameters of a module when its plan shards some: all are DTensors then, and each rank holds
a shard or the whole of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import Module, Parameter
from torch.nn.utils._named_member_accessor import NamedMemberAccessor

from ..capture.replaced_parameters import as_parameter
from ..strategies.placements import Placements, cut_axes


def shard_parameters(
    module: Module, parameters: Mapping[str, Placements], mesh: DeviceMesh
) -> None:
    """Replace all parameters, which are whole and the same on every rank, by DTensors: some with
    the given placements, the others whole. If no placements are given, replace none. Optimizers and
    norms that take many tensors at once take either plain ones or DTensors, so all are replaced. A
    tied parameter stays one."""
    if not parameters:
        return
    owners = dict(module.named_parameters(remove_duplicate=False))
    everywhere: Placements = (Replicate(),) * mesh.ndim
    given = {id(owners[name]): placements for name, placements in parameters.items()}
    for whole in list(module.parameters()):
        if isinstance(whole, DTensor):
            continue
        placements = given.get(id(whole), everywhere)
        part: Tensor = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
        if placements != everywhere:
            part = part.clone()  # a view would keep the whole alive
        made = Parameter(part, requires_grad=whole.requires_grad)
        made.__dict__.update(whole.__dict__)  # attributes that users set on their parameters
        NamedMemberAccessor(module).set_tensors_dict(
            {name: made for name, parameter in owners.items() if parameter is whole}
        )


def cut_to_fit(module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A pre-hook of ``load_state_dict``: where ``module`` has DTensors, replace whole tensors of
    the state by this rank's part."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        given = state.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(given, Tensor):
            if isinstance(given, DTensor) or given.shape != parameter.shape:
                continue  # sharded already, or for torch to refuse
            mesh, placements = parameter.device_mesh, parameter.placements
            whole = given.detach().to(parameter.device)
            state[prefix + name] = distribute_tensor(whole, mesh, placements, src_data_rank=None)


def as_read(parameter: Tensor) -> Tensor:
    """What a graph reads of a parameter: a plain tensor if it is a DTensor that is whole, else the
    parameter itself. The gradient of the plain tensor becomes the parameter's, and nothing moves:
    until ``sync_grad`` it is this rank's part of a sum."""
    if not isinstance(parameter, DTensor) or cut_axes(parameter):
        return parameter
    value = parameter.to_local(grad_placements=parameter.placements)
    # Without gradients to_local returns the very tensor that the DTensor holds.
    return as_parameter(value if torch.is_grad_enabled() else value.detach())
