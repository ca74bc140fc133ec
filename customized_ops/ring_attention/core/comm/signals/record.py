"""What a GPU that waits for peers tells its host, and the host's answer: int64s of the host's
memory. Two of them, then a slot for each rank:

    STOP      the host's answer: whoever waits is to stop
    ENDED     passes that have ended, where it is kernels of others that wait for messages
    slot      STATUS, the fingerprint CALL of the pass that waits, and THEIRS, that of the peer
"""

from __future__ import annotations

STOP, ENDED, SLOTS = range(3)
STATUS, CALL, THEIRS, SLOT_LENGTH = range(4)
# What STATUS may be: nothing to tell; it has waited for the peer for long; the peer is in another
# pass; it has stopped.
NOTHING, WAITS, DIFFERS, STOPPED = range(4)


def record_length(ranks: int) -> int:
    """Of a group of so many ranks."""
    return SLOTS + SLOT_LENGTH * ranks


def slot(peer: int) -> int:
    """Where a peer's slot starts."""
    return SLOTS + SLOT_LENGTH * peer
