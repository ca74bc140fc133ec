"""What a GPU that waits for peers tells its host, and the host's answer: int64s of the host's
memory, by index."""

from __future__ import annotations

STATUS, PEER, CALL, THEIRS, STOP, ENDED = range(6)
RECORD_LENGTH = 8
# ENDED counts passes, where it is kernels of others that wait for messages. What STATUS may be:
# nothing to tell; it has waited long for a peer, in the pass with the fingerprint CALL; the peer is
# in the pass THEIRS; it has stopped, as STOP told it to.
NOTHING, WAITS, DIFFERS, STOPPED = range(4)
