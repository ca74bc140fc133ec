"""What the function of a declared op must not do, found at its first calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..binding import BoundAnnotation
from ..errors import AnnotationError
from ..registry import OpRecord


@contextmanager
def watched(record: OpRecord, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Refuse two silent mistakes: a function that changes its arguments, which other ops in a graph
    use, and one that draws random numbers although it is run again for its gradient."""
    tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor) and not x.is_inference()}
    versions = {name: tensor._version for name, tensor in tensors.items()}
    draws = _Draws()
    with nullcontext() if record.saves_results else draws:
        yield
    changed = [name for name, tensor in tensors.items() if tensor._version != versions[name]]
    if changed:
        raise AnnotationError(
            f"the function changed its argument {', '.join(changed)} in place",
            details=["expected: a new tensor as the result"],
            op=record.title,
        )
    if draws.noticed:
        raise AnnotationError(
            f"the function drew random numbers ({draws.noticed}), and would draw others when it is "
            "run again for its gradient",
            details=["expected: the numbers, or a seed, as an argument; or a backward= of its own"],
            op=record.title,
        )


class _Draws(TorchDispatchMode):
    """Notices an op that draws random numbers in this thread."""

    noticed = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            with self:  # dropout, for one, draws only in training: look at the ops it is made of
                made = func.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
            self.noticed = str(func)
        return func(*args, **(kwargs or {}))


def check_results(record: OpRecord, bound: BoundAnnotation, results: Sequence[Tensor]) -> None:
    """Refuse results of other shapes than the annotation declares."""
    expected = bound.output_shapes()
    if len(results) != len(expected):
        problem = f"the outputs in the annotation are {len(expected)}, the results {len(results)}"
        raise AnnotationError(problem, bound.annotation.text, op=record.title)
    for n, (result, shape) in enumerate(zip(results, expected, strict=True)):
        scalar = result.ndim == 0 and shape == (1,)
        if shape is not None and tuple(result.shape) != shape and not scalar:
            problem = f"result {n} has shape {tuple(result.shape)}, but the annotation says {shape}"
            raise AnnotationError(f"{problem}: {bound.annotation}", op=record.title)
