"""What a simulation finds: when each rank does what."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ...arrays import Floats

KERNEL, HOST = "kernel", "host launch"
INSIDE, BETWEEN = "link inside", "link between hosts"
ATTENDS = ("own", "remote")  # whose rows a kernel attends
WAITS = (HOST, INSIDE, BETWEEN)  # what a rank may wait for


class Spans(NamedTuple):
    """Something that ranks do at the same point of their programs, each at its own time.

    Attributes:
        resource: what is busy: KERNEL, HOST, INSIDE or BETWEEN.
        what: in kernels one of ATTENDS, or "merge" (of results and gradients, and copies of what
            arrived); on links "keys", "rows", "results" (of others' rows) or "gradients" (of keys).
        sends: for links, whether it is the way out of a rank.
        stage: of the plan; 0 for rows.
        start, stop: float64[P], seconds; equal where a rank has nothing to do.
    """

    resource: str
    what: str
    sends: bool
    stage: int
    start: Floats
    stop: Floats


@dataclass(frozen=True, eq=False)
class PassTimeline:
    """A forward or a backward of all ranks, from the time at which all of them begin.

    Attributes:
        spans: in no order; each takes some time on at least one rank.
        stop: float64[P]: when each rank has its results and its host is done.
        waits: float64[3, P]: seconds for which each rank's kernels idle because of each of WAITS,
            before the rank stops.
    """

    spans: tuple[Spans, ...] = field(repr=False)
    stop: Floats
    waits: Floats

    @cached_property
    def seconds(self) -> float:
        """Time of the slowest rank."""
        return float(self.stop.max())

    @cached_property
    def idle(self) -> Floats:
        """float64[P]: seconds in which each rank's kernels do nothing, until all ranks stop."""
        return self.seconds - self.busy(KERNEL)

    def busy(self, resource: str, *, sends: bool = False) -> Floats:
        """float64[P]: seconds for which a resource of each rank is busy; of a link, one way."""
        took = [s.stop - s.start for s in self.spans if (s.resource, s.sends) == (resource, sends)]
        return np.sum(took, axis=0) if took else np.zeros_like(self.stop)

    @property
    def kernel_share(self) -> float:
        """Seconds in attention kernels, mean over the ranks, as a fraction of those of the pass:
        how much of the kernel's rate is kept."""
        attends = [
            s.stop - s.start for s in self.spans if s.what in ATTENDS and s.resource == KERNEL
        ]
        return float(np.sum(attends) / self.stop.size / self.seconds) if attends else 0.0

    @property
    def slowest_waits_for(self) -> tuple[str, float]:
        """What the rank that stops last waits for the longest, and for how many seconds."""
        waits = self.waits[:, self.stop.argmax()]
        return WAITS[waits.argmax()], float(waits.max())


@dataclass(frozen=True, eq=False)
class Timeline:
    """A plan's forward and backward in time.

    Attributes:
        rank_flops: floating-point operations of the forward, mean over the ranks; a backward has
            2.5 times as many.
    """

    forward: PassTimeline
    backward: PassTimeline
    rank_flops: float

    @property
    def forward_seconds(self) -> float:
        """Time of the slowest rank."""
        return self.forward.seconds

    @property
    def backward_seconds(self) -> float:
        """Time of the slowest rank."""
        return self.backward.seconds

    @property
    def seconds(self) -> float:
        """Time of both passes."""
        return self.forward_seconds + self.backward_seconds

    @property
    def tflops_per_rank(self) -> tuple[float, float]:
        """10^12 floating-point operations per second and rank, forward and backward."""
        forward, backward = self.forward.seconds, self.backward.seconds
        flops = self.rank_flops / 1e12
        return flops / forward if forward else 0.0, 2.5 * flops / backward if backward else 0.0

    def __str__(self) -> str:
        """A table of the two passes."""
        lines = [
            f"{'pass':<9}{'ms':>10}{'TFLOP/s a rank':>16}{'of the kernel':>15}  slowest waits for"
        ]
        passes = {"forward": self.forward, "backward": self.backward}
        for (name, each), tflops in zip(passes.items(), self.tflops_per_rank, strict=True):
            what, seconds = each.slowest_waits_for
            waits = f"{what}, {1e3 * seconds:.3f} ms" if seconds > 1e-6 else "nothing"
            lines.append(
                f"{name:<9}{1e3 * each.seconds:>10.3f}{tflops:>16.0f}{each.kernel_share:>15.1%}  "
                + waits
            )
        return "\n".join(lines)
