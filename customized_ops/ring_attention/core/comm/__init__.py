"""Moving token ranges between the ranks of a group.

``messages`` has :class:`Comm`, which the executor uses, over flat buffers between peers. Who passes
them: ``dist_comm`` a torch process group, ``one_sided`` (with ``placement``) copies into the peers'
memory, which ``symmetric`` provides on GPUs of one host, and ``inprocess`` threads. ``patience``
is how ranks wait for one another, on GPUs with the help of ``signals``, which also compare what
ranks are at.
``transfer_side`` takes tokens out of tensors and puts them there; ``comm_groups`` finds the Comm of
a process group.
"""

from .messages import Comm

__all__ = ["Comm"]
