"""Public functions as engines see them: which op a call makes, and how a cut changes the call.

Users call ``wrap_*_attn_func(q, k, v, ...)``. In a torch graph that becomes an op of
:mod:`~annotations.registry`. An engine that generates code works on the call itself: to it the
function is one op, whose tensors it cuts and which it calls with other arguments.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..after_import import import_with
from ..binding import BoundAnnotation, torn_dim
from ..grammar import Shape
from ..registry import AnnotatedOp, OpRecord, annotated_ops
from ..rules import Arguments, SplitSite


@dataclass(frozen=True, eq=False)
class PublicCall:
    """A function that an engine treats as one op.

    Attributes:
        function: the function that users call.
        op: from the call's arguments to the op that it makes, and to the arguments that the op's
            annotation depends on, by the op's names (tensors may be without data). Raises
            NotImplementedError for a call that cannot be cut.
        outputs: how many of the op's results the call returns, from its arguments.
        arguments: the shard's arguments of the call, from how the op is split.
        when_cut: the function to call instead if a split communicates inside.
        fake_peers: from a part's arguments (with data, of any values) and how it was cut to the
            arguments to change so that one rank can call it without the others and does the same
            work.
        names: the op's names of tensor arguments, where they differ from the call's.
        follow: from the name of an order of :class:`~annotations.rules.Reorders`, a split that
            communicates inside, and the code of each argument, to the code of those that name that
            order of tokens; None for a call that has no such arguments.
    """

    function: Callable[..., Any]
    op: Callable[[Arguments], tuple[OpRecord, Arguments]]
    outputs: Callable[[Arguments], int]
    arguments: Callable[[SplitSite], Arguments]
    when_cut: Callable[..., Any] | None = None
    fake_peers: Callable[[Arguments, Sequence[SplitSite]], Arguments] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    follow: Callable[[str, SplitSite, Mapping[str, str]], Mapping[str, str]] | None = None

    @cached_property
    def signature(self) -> inspect.Signature:
        """The function's signature."""
        return inspect.signature(self.function)

    @property
    def name(self) -> str:
        """``package.module.function``."""
        return qualified(self.function)

    def op_call(self, arguments: Arguments) -> tuple[OpRecord, Arguments]:
        """The op that a call makes, and all its arguments; None for those that do not matter to the
        annotation."""
        record, given = self.op(arguments)
        return record, {**dict.fromkeys(record.signature.parameters), **given}

    def shapes(self, arguments: Arguments, ranks: int) -> tuple[BoundAnnotation, dict[str, Shape]]:
        """The bound annotation, and how each tensor argument of the call is annotated.

        Args:
            arguments: all of the call's, by name; tensors may be without data.
            ranks: ranks that the op may be cut over, which decides between alternatives.
        Raises:
            BindingError: the shapes do not fit.
        """
        record, given = self.op_call(arguments)
        bound = _fitting(record.bindings(given), ranks)
        annotated = dict(zip(record.signature.parameters, bound.annotation.inputs, strict=False))
        own = {name: self.names.get(name, name) for name in arguments}
        return bound, {
            name: annotated[own[name]]
            for name, value in arguments.items()
            if isinstance(value, Tensor) and own[name] in annotated
        }


def qualified(function: Any) -> str:
    """``package.module.name`` of a function or an op.

    A process that multiprocessing spawns runs the main script again, as module ``__mp_main__``.
    """
    module = function.__module__
    return f"{'__main__' if module == '__mp_main__' else module}.{function.__name__}"


def _fitting(alternatives: tuple[BoundAnnotation, ...], ranks: int) -> BoundAnnotation:
    """The first alternative all of whose splits are possible over ``ranks``; else the first."""
    for bound in alternatives:
        if not any(torn_dim(bound, split, ranks) for split in bound.splits()):
            return bound
    return alternatives[0]


_calls: dict[str, PublicCall] = {}
_listeners: list[Callable[[], None]] = []


def declare_call(call: PublicCall) -> None:
    """Make a public function known to engines that generate code; to nnscaler as soon as a program
    has imported nnscaler as well."""
    _calls[call.name] = call
    import_with("nnscaler", "annotations.engines.nnscaler")
    for listener in _listeners:
        listener()


def on_declare(listener: Callable[[], None]) -> None:
    """Call ``listener`` whenever a function is declared."""
    _listeners.append(listener)


def declared_calls() -> dict[str, PublicCall]:
    """All declared functions by name, and each op that is called under a name of its own."""
    own = {qualified(op): call_of(op) for op in annotated_ops() if _is_named(op)}
    return {**own, **_calls}


def _is_named(op: AnnotatedOp) -> bool:
    module: Any = sys.modules.get(op.__module__)
    return getattr(module, qualified(op).rpartition(".")[2], None) is op


def call_of(op: AnnotatedOp) -> PublicCall:
    """The call of an op by its own name. It is timed on its part, with no group."""
    record = op.record

    def without_group(given: Arguments, sites: Sequence[SplitSite]) -> Arguments:
        return {
            name: ""
            for site in sites
            for name, value in record.rule.arguments(record.title, site).items()
            if site.group and value == site.group
        }

    return PublicCall(
        function=op,
        op=lambda given: (record, given),
        outputs=lambda given: record.n_outputs,
        arguments=lambda site: record.rule.arguments(record.title, site),
        fake_peers=without_group,
    )


def without_data(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor that has only a shape and a dtype, on the meta device."""
    return torch.empty(shape, dtype=dtype, device="meta")
