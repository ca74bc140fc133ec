"""Random calls over ranks, each against its specification on one device.

    python -m customized_ops.ring_attention fuzz --cases 5000 --seed 1

A trial is drawn from everything that the functions take (:mod:`.draw`): op, mask, layout, 1 to 8
ranks, heads, dtype, options; some run through ``parallelize`` under a policy. It is run and
compared with its specification in plain torch (:mod:`.trial`), in fp64 to 1e-10. One that fails is
made as small as it can be while it still fails in the same way (:mod:`.shrink`), and printed as a
script. :mod:`.kinds` has a file for each family of functions.

.. include:: ../docs/reliability.md
"""

from .kinds.attention import Case
from .kinds.convolution import ConvolutionCase
from .kinds.linear_attention import LinearAttentionCase
from .kinds.loss import LossCase
from .kinds.moves import MoveCase
from .kinds.rollouts import RolloutsCase
from .trial import Trial

__all__ = [
    "Case",
    "ConvolutionCase",
    "LinearAttentionCase",
    "LossCase",
    "MoveCase",
    "RolloutsCase",
    "Trial",
]
