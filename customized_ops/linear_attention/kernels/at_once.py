"""Kernels that are one function for a whole pass, behind the steps of :mod:`.protocol`: the first
step that is called runs the whole pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from .protocol import Gradients, Operands, nothing_kept, unit_states


@dataclass
class ForwardAtOnce:
    """See :class:`.protocol.Forward`.

    Attributes:
        run: the tokens and the initial states -> out, and the final states.
    """

    run: Callable[[Operands, Tensor | None], tuple[Tensor, Tensor]]
    x: Operands
    made: Tensor | None = None

    def states(self, initial: Tensor | None) -> Tensor:
        """Runs the whole pass."""
        self.made, final = self.run(self.x, initial)
        return final

    def matrices(self) -> Tensor:
        """Found as the final states of unit states."""
        return self.run(*unit_states(self.x))[1]

    def out(self, into: Tensor | None = None) -> Tensor:
        """What the pass computed."""
        assert self.made is not None
        return self.made

    def kept(self) -> Tensor:
        """Nothing is kept."""
        return nothing_kept(self.x)


@dataclass
class BackwardAtOnce:
    """See :class:`.protocol.Backward`.

    Attributes:
        run: the tokens, the initial states, the gradients of out and of the final states -> all
            gradients.
    """

    run: Callable[[Operands, Tensor | None, Tensor, Tensor | None], Gradients]
    x: Operands
    of: Tensor | None
    dout: Tensor
    made: Gradients | None = None

    def initial(self, dfinal: Tensor | None) -> Tensor | None:
        """Runs the whole pass."""
        self.made = self.run(self.x, self.of, self.dout, dfinal)
        return self.made.initial

    def ahead(self) -> None:
        """Nothing."""

    def gradients(self, into: Mapping[str, Tensor]) -> Gradients:
        """What the pass computed."""
        assert self.made is not None
        return self.made
