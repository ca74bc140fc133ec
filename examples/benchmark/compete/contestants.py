"""Who is measured: this package's ops, one GPU alone, and the peers."""

from __future__ import annotations

from collections.abc import Callable

from benchmark.cases import Case
from benchmark.compete.peers import te_cp
from benchmark.compete.peers.kernels import Kernel
from benchmark.compete.rivals import peers
from benchmark.contestant import (
    ONE_CALL,
    Alone,
    Attention,
    Choice,
    Contestant,
    alone,
    contiguous,
    device_kernels,
    whole_form,
)
from benchmark.ops import Op, recommended
from benchmark.ranks import Ranks
from customized_ops.ring_attention import Layout


def contestants(choice: Choice) -> list[Contestant]:
    """All contestants, including those that are not installed."""
    return [*ours(choice), *single(choice), *peers(choice)]


def ours(choice: Choice) -> list[Contestant]:
    """The public ops, with the layout that suits a mask, and with contiguous shards."""
    rest = {
        "kernel": choice.kernel,
        "reduce_dtype": choice.reduce_dtype,
        "deterministic": choice.deterministic,
    }

    def of(name: str, layout: Callable[[Case, int], Layout]) -> Contestant:
        def make(case: Case, ranks: Ranks) -> Attention:
            return Op(case, layout(case, ranks.size), ranks.group, rest)

        def refuses(case: Case, ranks: int) -> str | None:
            same = name != "seqshard" and layout(case, ranks) == recommended(case, ranks)
            return "as seqshard, whose shards are contiguous for this mask" if same else None

        return Contestant(name, choice.kernel, make, layout, refuses)

    return [of("seqshard", recommended), of("seqshard contiguous", contiguous)]


def single(choice: Choice) -> list[Contestant]:
    """The whole problem on each rank alone: library calls, and the public op without a group."""
    found = []
    for kernel in device_kernels(choice):

        def make(case: Case, ranks: Ranks, kernel: Kernel = kernel) -> Attention:
            return Alone(kernel, whole_form(case, ranks.device))

        missing = kernel.missing(choice.device)
        name = f"single {kernel.name}"
        found.append(Contestant(name, kernel.name, make, alone, _no_library_call, True, missing))
    for name in choice.single:

        def make_op(case: Case, ranks: Ranks, name: str = name) -> Attention:
            return Op(case, alone(case, 1), None, {"kernel": name})

        missing = te_cp.missing(choice.device) if name == "te" else None
        found.append(
            Contestant(f"single op {name}", name, make_op, alone, whole=True, missing=missing)
        )
    return found


def _no_library_call(case: Case, ranks: int) -> str | None:
    known = case.kind in ONE_CALL
    return None if known else "the library has no single call for this mask"
