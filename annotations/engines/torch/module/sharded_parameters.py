"""Parameters of a plan that keeps some in parts: all are DTensors, of which each rank holds a shard
or the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.utils._named_member_accessor import NamedMemberAccessor
from torch.nn.utils.stateless import _reparametrize_module

from ..strategies.placements import Places, cut_axes


def replicated(local: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that is whole and the same on every rank, as a DTensor."""
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def keep_in_parts(
    module: torch.nn.Module, parameters: Mapping[str, Places], mesh: DeviceMesh
) -> None:
    """Replace all parameters, whole and the same on every rank, by DTensors: some with the given
    placements, the others whole. Where none is given, nothing is replaced.

    Optimizers and norms that take many tensors at once take either plain ones or DTensors. A
    parameter with several names stays one.
    """
    if not parameters:
        return
    owners = dict(module.named_parameters(remove_duplicate=False))
    everywhere: Places = (Replicate(),) * mesh.ndim
    given = {id(owners[name]): places for name, places in parameters.items()}
    for whole in list(module.parameters()):
        if isinstance(whole, DTensor):
            continue
        places = given.get(id(whole), everywhere)
        part: Tensor = distribute_tensor(whole.detach(), mesh, places, src_data_rank=None)
        if places != everywhere:
            part = part.clone()  # a view would keep the whole alive
        made = torch.nn.Parameter(part, requires_grad=whole.requires_grad)
        made.__dict__.update(whole.__dict__)  # what users note on their parameters
        NamedMemberAccessor(module).set_tensors_dict(
            {name: made for name, parameter in owners.items() if parameter is whole}
        )


def as_read(parameter: Tensor) -> Tensor:
    """What a graph reads: of a parameter that is whole a plain tensor, of any other all of it.

    The gradient of the plain tensor becomes that of the parameter, and nothing moves: until
    ``sync_grad`` it is this rank's part of a sum.
    """
    if not isinstance(parameter, DTensor) or cut_axes(parameter):
        return parameter
    value = parameter.to_local(grad_placements=parameter.placements)
    if not torch.is_grad_enabled():
        value = value.detach()  # not the very tensor that the DTensor holds
    value._is_param = True  # type: ignore[attr-defined]  # a stand-in for it, to isinstance too
    return value


def cut_to_fit(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole tensors of a state by this rank's part, where ``module`` has DTensors: a hook
    before ``load_state_dict``."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        given = state.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(given, Tensor):
            if isinstance(given, DTensor) or given.shape != parameter.shape:
                continue  # sharded already, or for torch to refuse
            mesh, places = parameter.device_mesh, parameter.placements
            whole = given.detach().to(parameter.device)
            state[prefix + name] = distribute_tensor(whole, mesh, places, src_data_rank=None)


@contextmanager
def whole_without_data(
    module: torch.nn.Module, dtype: torch.dtype | None = None
) -> Iterator[FakeTensorMode]:
    """While inside, ``module`` has parameters and buffers of the whole shapes and no data.

    A capture needs no values: so a module is captured that is in parts, or was never in memory.

    Args:
        dtype: of those that are floating, as after ``module.to(dtype)``; by default their own.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named |= module.named_buffers(remove_duplicate=False)
    fakes = {id(tensor): _fake(mode, tensor, dtype) for tensor in named.values()}
    values = {name: fakes[id(tensor)] for name, tensor in named.items()}
    with _reparametrize_module(module, values, stack_weights=True):
        yield mode


def _fake(mode: FakeTensorMode, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    # The graph holds the device; what was never on one is planned as on a CPU.
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    with mode:
        made = torch.empty_strided(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            dtype=dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype,
            device=device,
        )
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made
