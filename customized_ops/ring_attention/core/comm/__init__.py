"""Moving token ranges between the ranks of a group.

``messages`` has :class:`Comm`, which the executor uses: a ``rank_group`` that moves token ranges
between peers, as flat buffers. ``dist_comm`` passes them over a torch process group, whose ``ways``
carry them, ``one_sided`` by copies into the peers' memory, and ``inprocess`` between threads.
``patience`` is how ranks wait for one another. It uses ``notes`` in the group's store and, on GPUs,
``signals``, which also check that ranks are in the same pass. ``links`` knows which ranks share a
host, and measures the links between them. ``transfer_side`` takes tokens out of tensors and puts
them into tensors, ``packing`` makes messages of them, and ``outbox`` has what leaves together.
``comm_groups`` finds the Comm of a process group.
"""

from .messages import Comm

__all__ = ["Comm"]
