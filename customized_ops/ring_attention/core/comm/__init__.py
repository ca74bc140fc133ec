"""Moving token ranges between the ranks of a group.

``messages`` has :class:`Comm`, which the executor uses: a ``rank_group`` that moves token ranges,
as flat buffers between peers. Who passes them: ``dist_comm`` a torch process group, ``one_sided``
copies into the peers' memory, and ``inprocess`` threads. ``patience`` is how ranks wait for one
another, by ``notes`` in the group's store, on GPUs with the help of ``signals``, which also compare
what ranks are at. ``links`` knows which ranks share a host, and measures what is between them.
``transfer_side`` takes tokens out of tensors and puts them there; ``comm_groups`` finds the Comm of
a process group.
"""

from .messages import Comm

__all__ = ["Comm"]
