"""What the adapters to all other packages share: groups, refusals, order of bases, functions made
from others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from annotations.groups import GroupError

from ..core.comm.comm_groups import GroupLike

# Keyword arguments that models of transformers pass down to their layers.
NOT_ABOUT_ATTENTION = (
    "use_cache",
    "cache_position",
    "return_dict",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
)


def group_of(title: str, where: GroupLike | DeviceMesh, axes: int = 1) -> GroupLike:
    """The ``process_group`` argument of ops, from a DeviceMesh or from anything that ops accept.

    Args:
        title: the function that was called, for messages.
        axes: the most axes that the mesh may have. The ranks of several axes form one group, in
            increasing order, which only its members create, on first use.
    Raises:
        GroupError: a mesh with more axes.
    """
    if not isinstance(where, DeviceMesh):
        return where
    if where.ndim > axes:
        names: Sequence[object] = where.mesh_dim_names or range(where.ndim)
        raise GroupError(
            f"{title}: the mesh has {where.ndim} axes, {', '.join(map(str, names))}, and at most "
            f"{axes} fits; pass the one that the sequence is cut over, as mesh[{names[-1]!r}]"
        )
    return where.get_group() if where.ndim == 1 else sorted(where.mesh.flatten().tolist())


def refuse(title: str, reasons: Mapping[str, str], **given: object) -> None:
    """Raise NotImplementedError, with its reason, for an argument that is neither None nor False.

    Args:
        reasons: by argument; ``{value}`` in a reason stands for the argument's value.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{title}: {reasons[name].format(value=repr(value))}")


def renamed(
    call: Callable[..., Any], name: str, signature: inspect.Signature, doc: str | None
) -> Callable[..., Any]:
    """``call`` itself, given the name, signature and docstring that errors and help show."""
    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def without_first(function: Callable[..., Any], *others: str) -> inspect.Signature:
    """The signature of ``function`` without its first parameter and without ``others``."""
    plain = inspect.signature(function)
    free = [each for each in list(plain.parameters.values())[1:] if each.name not in others]
    return plain.replace(parameters=free)


def with_fixed(
    function: Callable[..., Any], name: str, doc: str, **fixed: Any
) -> Callable[..., Any]:
    """``function`` with its first argument (a name) and others fixed; its signature lacks them."""
    signature = without_first(function, *fixed)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(name, **fixed, **signature.bind(*args, **kwargs).arguments)

    return renamed(call, name, signature, doc)


def require_first(cls: type, ours: type, hook: str) -> None:
    """Raise TypeError if a base of ``cls`` that has the method ``hook`` goes before ``ours``."""
    for base in cls.__mro__[: cls.__mro__.index(ours)]:
        if hook in vars(base) and not issubclass(base, ours):
            raise TypeError(
                f"{cls.__name__}: {base.__name__} goes before {ours.__name__}, whose methods "
                f"are then not called; write class {cls.__name__}({ours.__name__}, ...)"
            )
