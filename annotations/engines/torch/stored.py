"""Parameters that a plan keeps in parts: each rank holds its shard of them, as a DTensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .lying import Places
from .moves import brought


def keep_in_parts(
    module: torch.nn.Module, parameters: Mapping[str, Places], mesh: DeviceMesh
) -> None:
    """Replace parameters, whole and the same on every rank, by DTensors that lie as given.

    A parameter with several names stays one.
    """
    owners = dict(module.named_parameters(remove_duplicate=False))
    for name, places in parameters.items():
        whole = owners[name]
        if isinstance(whole, DTensor):
            continue
        replicated = DTensor.from_local(
            whole.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False
        )
        part = brought(replicated, places)
        local = part.to_local().clone()  # a view would keep the whole alive
        made = torch.nn.Parameter(
            DTensor.from_local(
                local, mesh, places, run_check=False, shape=whole.shape, stride=whole.stride()
            ),
            requires_grad=whole.requires_grad,
        )
        for other, parameter in owners.items():
            if parameter is whole:
                _set(module, other, made)


def cut_to_fit(module: torch.nn.Module, state: dict[str, Any], prefix: str = "") -> None:
    """Replace whole tensors of a state by this rank's part, where ``module`` keeps parts."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        given = state.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(given, Tensor):
            if isinstance(given, DTensor) or given.shape != parameter.shape:
                continue  # as it lies, or for torch to refuse
            mesh = parameter.device_mesh
            whole = given.to(parameter.device)
            replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            state[prefix + name] = brought(replicated, tuple(parameter.placements))


@contextmanager
def whole_without_data(module: torch.nn.Module) -> Iterator[FakeTensorMode]:
    """While inside, ``module`` has parameters and buffers of the whole shapes and no data.

    To be captured again, which needs no values, where it is kept in parts or was never in memory.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    fakes: dict[int, Tensor] = {}
    try:
        for name, tensor in (*parameters.items(), *buffers.items()):
            if id(tensor) not in fakes:
                fakes[id(tensor)] = _fake(mode, tensor, isinstance(tensor, torch.nn.Parameter))
            _set(module, name, fakes[id(tensor)])
        yield mode
    finally:
        for name, tensor in (*parameters.items(), *buffers.items()):
            _set(module, name, tensor)


def _fake(mode: FakeTensorMode, tensor: Tensor, parameter: bool) -> Tensor:
    # The graph holds the device; what was never on one is planned as on a CPU.
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    with mode:
        made = torch.empty_strided(
            tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device=device
        )
    return torch.nn.Parameter(made, tensor.requires_grad) if parameter else made


def _set(module: torch.nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    place = owner._parameters if leaf in owner._parameters else owner._buffers
    place[leaf] = tensor  # type: ignore[assignment]
