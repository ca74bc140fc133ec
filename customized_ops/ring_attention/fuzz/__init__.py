"""Random attention calls over ranks, each against dense attention on one device.

    python -m customized_ops.ring_attention fuzz --cases 5000 --seed 1

A trial is drawn from everything that the functions take (:mod:`.draw`): op, mask, layout, 1 to 8
ranks, heads, dtype, options; some run through ``parallelize`` under a policy. It is run and
compared with dense attention (:mod:`.trial`), in fp64 to 1e-10. One that fails is made as small as
it can be while it still fails in the same way (:mod:`.shrink`), and printed as a script.

.. include:: ../docs/reliability.md
"""

from .attention_case import Case
from .trial import Trial

__all__ = ["Case", "Trial"]
