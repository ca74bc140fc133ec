"""A module's parameters as a plan keeps them, and as a graph reads them.

Where a plan keeps some in parts all are DTensors, of which each rank holds a shard or the whole.
What computes in another dtype than parameters are kept in casts them where they are read. Autograd
casts the gradient back, so that sums over micro-batches and ranks, and the optimizer, see the dtype
of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import Module, Parameter
from torch.nn.utils._named_member_accessor import NamedMemberAccessor
from torch.nn.utils.stateless import _reparametrize_module

from ..strategies.placements import Placements, cut_axes


def replicated(local: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that is whole and the same on every rank, as a DTensor."""
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def keep_in_parts(module: Module, parameters: Mapping[str, Placements], mesh: DeviceMesh) -> None:
    """Replace all parameters, whole and the same on every rank, by DTensors: some with the given
    placements, the others whole; none where none is given. Optimizers and norms that take many
    tensors at once take either plain ones or DTensors. A tied parameter stays one."""
    if not parameters:
        return
    owners = dict(module.named_parameters(remove_duplicate=False))
    everywhere: Placements = (Replicate(),) * mesh.ndim
    given = {id(owners[name]): places for name, places in parameters.items()}
    for whole in list(module.parameters()):
        if isinstance(whole, DTensor):
            continue
        places = given.get(id(whole), everywhere)
        part: Tensor = distribute_tensor(whole.detach(), mesh, places, src_data_rank=None)
        if places != everywhere:
            part = part.clone()  # a view would keep the whole alive
        made = Parameter(part, requires_grad=whole.requires_grad)
        made.__dict__.update(whole.__dict__)  # what users note on their parameters
        NamedMemberAccessor(module).set_tensors_dict(
            {name: made for name, parameter in owners.items() if parameter is whole}
        )


def cut_to_fit(module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
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


def as_parameter(value: Tensor) -> Tensor:
    """``value``, marked as torch marks what stands for a Parameter, to isinstance too."""
    value._is_param = True  # type: ignore[attr-defined]
    return value


def as_read(parameter: Tensor) -> Tensor:
    """What a graph reads: of a parameter that is whole a plain tensor, of any other all of it. The
    gradient of the plain tensor becomes that of the parameter, and nothing moves: until
    ``sync_grad`` it is this rank's part of a sum."""
    if not isinstance(parameter, DTensor) or cut_axes(parameter):
        return parameter
    value = parameter.to_local(grad_placements=parameter.placements)
    # Without gradients to_local returns the very tensor that the DTensor holds.
    return as_parameter(value if torch.is_grad_enabled() else value.detach())


def cast(attribute: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A parameter in the dtype to compute in; buffers as they are."""
    return as_parameter(attribute.to(dtype)) if _is_cast(attribute, dtype) else attribute


def call_in_dtype(
    module: Module, dtype: torch.dtype | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """``module(*args, **kwargs)`` with its parameters in the dtype to compute in."""
    if dtype is None:
        return module(*args, **kwargs)
    with _replaced(module, lambda tensor: cast(tensor, dtype)):
        return module(*args, **kwargs)


def in_dtype(module: Module, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """While inside, the module has copies of its parameters in the dtype to compute in."""

    def copied(p: Tensor) -> Tensor:
        return Parameter(p.detach().to(dtype), p.requires_grad) if _is_cast(p, dtype) else p

    return _replaced(module, copied)


@contextmanager
def whole_without_data(module: Module, dtype: torch.dtype | None = None) -> Iterator[Any]:
    """While inside, ``module`` has parameters and buffers of the whole shapes and no data, so that
    one can be captured that is in parts, or was never in memory.

    Args:
        dtype: of those that are floating, as after ``module.to(dtype)``; by default their own.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        # The graph holds the device; what was never on one is planned as on a CPU.
        device = "cpu" if tensor.is_meta else tensor.device
        now = dtype if tensor.is_floating_point() else None
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        with mode:
            made = torch.empty_strided(shape, stride, dtype=now or tensor.dtype, device=device)
        return Parameter(made, tensor.requires_grad) if isinstance(tensor, Parameter) else made

    with _replaced(module, fake):
        yield mode


def _is_cast(value: Tensor, dtype: torch.dtype | None) -> bool:
    floating = isinstance(value, Parameter) and value.is_floating_point()
    return dtype is not None and floating and value.dtype != dtype


def _replaced(module: Module, make: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """While inside, the module has what is made of its parameters and buffers, tied ones tied."""
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named |= module.named_buffers(remove_duplicate=False)
    made = {id(tensor): make(tensor) for tensor in dict.fromkeys(named.values())}
    values = {n: made[id(t)] for n, t in named.items() if made[id(t)] is not t}
    return _reparametrize_module(module, values, stack_weights=True)
