"""Mistakes in the declaration of an op that can be found before any call."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import AnnotationError, Span
from .grammar import Annotation, Reduce
from .rules import PartitionRule
from .solving import reduces_of


def check_declaration(
    title: str,
    annotation: Annotation,
    arguments: Iterable[str],
    n_outputs: int,
    rule: PartitionRule,
) -> None:
    """Refuse an annotation that no call can fit, or of which some split would be wrong.

    Args:
        arguments: names of the function's. n_outputs: tensors that it returns.
    Raises:
        AnnotationError: says what is wrong, and what would be accepted.
    """
    names = list(arguments)
    if len(annotation.inputs) > len(names):
        raise AnnotationError(
            f"{len(annotation.inputs)} inputs, but the function has {len(names)} arguments",
            annotation.text,
            annotation.inputs[len(names)].span,
            [f"expected: at most one for each of {', '.join(names) or 'none'}"],
            title,
        )
    if len(annotation.outputs) != n_outputs:
        raise AnnotationError(
            f"{len(annotation.outputs)} outputs, but the function returns {n_outputs}",
            annotation.text,
            annotation.outputs[-1].span if annotation.outputs else None,
            ["expected: one output for each tensor that is returned"],
            title,
        )
    inputs = reduces_of(annotation.inputs)
    outputs = reduces_of(annotation.outputs)
    for name in outputs:
        if name not in inputs and name not in ("?", "*") and not name.isdecimal():
            raise AnnotationError(
                f"{name!r} is in no input, so its size is never known",
                annotation.text,
                _span(annotation, name),
                ["expected: a name of an input, a size, or '?' as the output, with fake="],
                title,
            )
    check_reduced(title, annotation, rule)
    for name in (*rule.communicates, *rule.told):
        if inputs.get(name, Reduce.FROZEN) is Reduce.FROZEN:
            raise AnnotationError(
                f"the rule is for splits of {name!r}, which can never be split",
                annotation.text,
                _span(annotation, name),
                [f"expected: rules for {_listed(n for n, r in inputs.items() if _open(n, r))}"],
                title,
            )


def check_reduced(title: str, annotation: Annotation, rule: PartitionRule) -> None:
    """Refuse a dim that may be split but is in no result, not marked '+', and without a rule: each
    rank's result would be that of its part alone.

    Raises:
        AnnotationError: says how to mark it.
    """
    if any(shape.ignored for shape in annotation.outputs):
        return  # a result of any shape may contain it
    outputs = reduces_of(annotation.outputs)
    for name, reduce in reduces_of(annotation.inputs).items():
        settled = name in outputs or name in rule.communicates or name in rule.told
        if reduce is Reduce.SPLIT and name != "*" and not settled:
            raise AnnotationError(
                f"{name!r} is in no output, and a split of it would go unnoticed",
                annotation.text,
                _span(annotation, name),
                [
                    f"expected: '{name}+' if results are then sums to be added up, '{name}^' if it "
                    "is never to be split, or a rule for it"
                ],
                title,
            )


def _span(annotation: Annotation, name: str) -> Span | None:
    shapes = (*annotation.inputs, *annotation.outputs)
    dims = [dim for shape in shapes for dim in shape.dims if name in dim.identifiers]
    return dims[0].span_of(name) if dims else None


def _open(name: str, reduce: Reduce) -> bool:
    return reduce is not Reduce.FROZEN and name != "*"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing: no dim of it can be split"
