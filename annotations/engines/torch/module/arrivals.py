"""Which gradients are new: a backward has added to them since ranks last added them up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.nn import Parameter
from torch.utils.weak import TensorWeakRef


class Arrivals:
    """The gradients of a module's parameters.

    Attributes:
        new: the parameters that a backward has come to since the last :meth:`alone`.
    """

    def __init__(self) -> None:
        self.new: set[Parameter] = set()
        self._watched: list[Parameter] = []
        self._hooks: list[Any] = []
        self._summed: dict[Parameter, TensorWeakRef] = {}

    def watch(self, parameters: Sequence[Parameter]) -> None:
        """Take these parameters, before the backward."""
        parameters = [p for p in parameters if p.requires_grad]
        if list(map(id, parameters)) == list(map(id, self._watched)):
            return
        for hook in self._hooks:
            hook.remove()
        self._watched = parameters
        add = self.new.add
        self._hooks = [p.register_post_accumulate_grad_hook(add) for p in parameters]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While inside, where ranks add up gradients, those that they have added up before are
        missing; thereafter only where another has come instead.

        A gradient that was put into ``.grad`` by hand counts as new.
        """
        old = {
            p: p.grad
            for p, summed in self._summed.items()
            if p.grad is not None and p not in self.new and summed() is p.grad
        }
        for parameter in old:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, grad in old.items():
                if parameter.grad is None:
                    parameter.grad = grad
        self.new.clear()
        self._summed = {p: TensorWeakRef(p.grad) for p in self._watched if p.grad is not None}
