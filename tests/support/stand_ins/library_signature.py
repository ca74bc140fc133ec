"""Functions that take what those of a library take."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any

import torch


def signature_of(arguments: str) -> Signature:
    """The signature with these ``arguments``, by name; those after a bar have a default, None."""
    required, _, optional = arguments.partition("|")
    kind = Parameter.POSITIONAL_OR_KEYWORD
    return Signature(
        [Parameter(name, kind) for name in required.split()]
        + [Parameter(name, kind, default=None) for name in optional.split()]
    )


def signature_of_op(name: str) -> Signature:
    """That of an op of torch, whose arguments must be given by name."""
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    return Signature(
        [
            Parameter(
                argument.name,
                Parameter.KEYWORD_ONLY,
                default=argument.default_value if argument.has_default_value() else Parameter.empty,
            )
            for argument in arguments
        ]
    )


def takes(signature: Signature) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Give a function this signature. It gets all arguments as attributes of one object."""

    def with_signature(function: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            bound = signature.bind(*args, **given)
            bound.apply_defaults()
            return function(SimpleNamespace(**bound.arguments))

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return with_signature
