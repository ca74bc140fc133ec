"""The code of a part's call: the function, its shard's arguments, and the group of its ranks."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from annotations.codegen.constants import is_text
from annotations.codegen.public_call import qualified
from annotations.registry import AnnotatedOp

from . import placement


def imports_of(name: str) -> str:
    """The import statements for calls of the function ``name``."""
    ours = [f"annotations.{m}" for m in ("codegen.constants", "codegen.gradient_shares", "groups")]
    modules = [*ours, name.rpartition(".")[0]]
    return "\n".join(f"import {module}" for module in modules if module != "__main__")


def emit(
    node: Any,
    args: Sequence[str],
    kwargs: Mapping[str, str],
    runtime_devid: int,
    plan_ndevs: int,
    runtime_ndevs: int,
) -> str:
    """The code of a part's call; nnscaler calls this.

    Args:
        node: the part, an :class:`~.op_node.OpNode`.
        args, kwargs: code of the arguments.
        runtime_devid: global rank of the device that runs it; plan_ndevs: ranks of a scale unit.
    Raises:
        PartitionError: the parts of an op that communicates inside are not in rank order, or
            nnscaler's adapters would swap them.
    """
    call, rule, sites = node.call, node.rule, node.sites()
    offset = runtime_devid // plan_ndevs * plan_ndevs
    code: dict[str, str] = {**dict(zip(node.names, args, strict=True)), **kwargs}
    function = call.function
    groups: dict[str, str] = {}
    for site in sites:
        ranks: tuple[int, ...] = ()
        if site.group:
            ranks = tuple(d + offset for d in placement.devices(node, site, node.placed))
            groups[repr(site.group)] = f"annotations.groups.name_of_ranks({ranks})"
            function = call.when_cut or function
        shard = call.arguments(replace(site, ranks=ranks))
        code |= {name: repr(value) for name, value in shard.items() if name in code}
        if node.order is not None and site.identifier in rule.orders:
            assert call.follow is not None
            given = {name: _code(text) for name, text in code.items()}
            code |= call.follow(node.order, site, given)
    placement.check_order(node, rule, node.placed)
    parameters = call.signature.parameters
    written = [
        f"{name}={_code(groups.get(text, text))}"
        for name, text in code.items()
        if text != repr(parameters[name].default)
    ]
    made = f"{_target(function)}({', '.join(written)})"
    parts = placement.divisors(node.anno, node.outputs(), sites, rule)
    if max(parts) == 1:
        return made
    return f"annotations.codegen.gradient_shares.divided({made}, {parts})"


def _target(function: Any) -> str:
    """How generated code names a function; an op by its name in ``torch.ops``."""
    if isinstance(function, AnnotatedOp):
        return f"torch.ops.{function.record.name.replace('::', '.')}"
    return qualified(function)


def _code(text: str) -> str:
    if text[:1] in "'\"" and is_text(ast.literal_eval(text)):
        return f"annotations.codegen.constants.from_text({text})"
    return text
