"""A call on one rank: its tokens, the segments of all ranks, and the size of their maps."""

from __future__ import annotations

from dataclasses import dataclass

from ..along_sequence import LocalSegments, Segments
from ..ring_attention.core.comm import Comm
from .chains import MapBytes, Scan, scan_of
from .kernels import Kernel, Operands


@dataclass(frozen=True)
class RankCall:
    """A call on one rank.

    Attributes:
        x: the rank's tokens in the order of the sequence.
        segments: the segments of all ranks. comm: the ranks.
    """

    x: Operands
    segments: Segments
    comm: Comm
    kernel: Kernel

    @property
    def local(self) -> LocalSegments:
        """The rank's segments."""
        return self.segments.local(self.comm.rank)

    def scan(self, backward: bool = False) -> Scan | None:
        """What travels in a pass; None where no document spans segments."""
        (b, _, hv, dv), dk = self.x.v.shape, self.x.q.shape[-1]
        of_map = map_bytes(self.x.delta, self.x.channels, b, hv, dk, dv)
        return scan_of(self.segments, of_map, self.comm.costs, backward)

    def fingerprint(self, what: str) -> int:
        """The fingerprint of a pass: everything that ranks must agree on."""
        tensors = [(name, t.shape[:1], t.shape[2:], t.dtype) for name, t in self.x.tensors.items()]
        return self.segments.fingerprint(what, tensors, self.x.scale)


def map_bytes(dense: bool, channels: bool, b: int, hv: int, dk: int, dv: int) -> MapBytes:
    """Bytes of a segment's map in fp32: ``dense`` for the delta rule; ``channels``: a decay per
    channel, not per head."""
    a = dk * dk if dense else dk if channels else 1
    return MapBytes(4 * b * hv * a, 4 * b * hv * dk * dv)
