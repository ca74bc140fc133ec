"""The record: what a GPU that waits for peers tells its host, and the host's answer. It is int64s
in the host's memory, two of them and then a slot for each rank:

    STOP      the host's answer: all that wait are to stop
    ENDED     passes that have ended, where kernels of other libraries wait for messages
    slot      STATUS, the fingerprint CALL of the pass that waits, and THEIRS, that of the peer
"""

from __future__ import annotations

STOP, ENDED, SLOTS = range(3)
STATUS, CALL, THEIRS, SLOT_LENGTH = range(4)
# What STATUS may be: nothing to tell; the GPU has waited for the peer for long; the peer is in
# another pass; the GPU has stopped.
NOTHING, WAITS, DIFFERS, STOPPED = range(4)


def record_length(ranks: int) -> int:
    """The length of the record for ``ranks`` ranks."""
    return SLOTS + SLOT_LENGTH * ranks
