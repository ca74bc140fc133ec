"""Fingerprints of passes whose messages go between GPUs. With the first message of a pass to each
peer goes one more number, the stamp, which the peer's GPU compares. Groups of more ranks than flags
are for only watch that passes end."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch

from ..patience import Patience
from ..rank_group import Messages
from .flags import CHANNELS, MOST_RANKS, Flags
from .watch import Watch

KEPT = 64  # fingerprints that are kept on the device


class Stamps:
    """The stamps of one rank's passes."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        patience: Patience,
        stop: Callable[[], None],
    ) -> None:
        """``stop`` ends messages that are on their way; for the rest see :class:`.Watch`."""
        # Indexed by the number of the pass and by peer: streams may be in different passes.
        self._compares = size <= MOST_RANKS
        size, rank = (size, rank) if self._compares else (1, 0)
        with torch.inference_mode(False):
            self._arrived = torch.zeros(CHANNELS * size, dtype=torch.int64, device=device)
        self._size, self._passes = size, 0
        self._flags = Flags([self._arrived] * size, rank, device)
        self._watch = Watch(patience, self._flags.record, stop)
        self._made = partial(torch.full_like, self._arrived[:1])
        self._kept = lru_cache(KEPT)(self._made)
        self._call: int | None = None
        self._number = 0  # that of the pass, where the watch waits for its end
        self._sent: set[int] = set()
        self._received: set[int] = set()

    def check(self, what: str) -> None:
        """Raises PeerFailed where a pass before ``what`` was not that of a peer."""
        self._watch.check(what)

    def begin(self, call: int, what: str) -> None:
        """A pass with this fingerprint and name begins."""
        self._watch.name(call, what)
        self._call, self._passes = call, self._passes + 1
        self._sent, self._received = set(), set()
        # What a CUDA graph captures happens later, or never.
        captured = torch.cuda.is_current_stream_capturing()
        self._number = 0 if captured else self._watch.begin(call)

    def end(self) -> None:
        """The pass ends once the current stream gets here."""
        self._call = None
        if self._number:
            self._flags.mark(self._number)

    def fail(self) -> None:
        """If a pass has begun, it will not end."""
        if self._call is not None and self._number:
            self._watch.forget()
        self._call = None

    def add_to(self, send: Messages, receive: Messages) -> tuple[Messages, Messages, list[int]]:
        """The messages, with stamps at the first ones of a pass, and the peers that send stamps."""
        if self._call is None or not self._compares:
            return send, receive, []
        first, to = sorted(receive.keys() - self._received), send.keys() - self._sent
        self._received.update(first)
        self._sent.update(to)
        stamp = (self._kept if self._number else self._made)(self._call)
        sent = {peer: [*each, stamp] if peer in to else each for peer, each in send.items()}
        received = dict(receive)
        for peer in first:
            place = self._channel * self._size + peer
            received[peer] = [*receive[peer], self._arrived[place : place + 1]]
        return sent, received, first

    def comparing(self, wait: Callable[[], None], peers: list[int]) -> Callable[[], None]:
        """``wait``, after which the stamps of these peers are compared."""
        channel, call = self._channel, self._call
        assert call is not None

        def both() -> None:
            wait()
            self._flags.wait(peers, channel, call)

        return both

    @property
    def _channel(self) -> int:
        return self._passes % CHANNELS
