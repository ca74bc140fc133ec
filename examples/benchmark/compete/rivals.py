"""The peers as contestants: schemes that are written here, and packages that are installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch.distributed as dist

from benchmark.cases import Case
from benchmark.compete.peers import packages, te_cp, torch_cp
from benchmark.compete.peers.kernels import Kernel
from benchmark.compete.peers.llama3_allgather import Llama3AllGather
from benchmark.compete.peers.ring import Ring
from benchmark.compete.peers.scheme import Scheme
from benchmark.compete.peers.ulysses import Ulysses
from benchmark.compete.peers.zigzag_ring import FullRing, ZigzagRing
from benchmark.compete.peers.zigzag_varlen_ring import ZigzagVarlenRing
from benchmark.contestant import (
    ONE_CALL,
    Alone,
    Attention,
    Choice,
    Contestant,
    contiguous,
    device_kernels,
    only,
    whole_form,
    zigzag,
)
from benchmark.ranks import Ranks
from customized_ops.ring_attention import Layout

WHOLE_ROWS = ("causal", "full", "packed", "packed full")


def peers(choice: Choice) -> list[Contestant]:
    """Other packages' schemes, written here, and the packages that are installed."""
    found: list[Contestant] = []
    for kernel in device_kernels(choice):
        found += written_here(kernel, kernel.missing(choice.device))
    return [*found, *torch_rings(choice), *te_rings(choice), *installed(choice)]


def written_here(kernel: Kernel, missing: str | None) -> list[Contestant]:
    """The schemes of ``peers/`` with a kernel."""

    def of(
        name: str,
        scheme: Callable[[Case, Ranks], Scheme],
        layout: Callable[[Case, int], Layout],
        refuses: Callable[[Case, int], str | None],
    ) -> Contestant:
        title = f"{name} fa2" if kernel.name == "fa2" else name
        return Contestant(title, kernel.name, scheme, layout, refuses, missing=missing)

    def gather(stride: int) -> Callable[[Case, Ranks], Scheme]:
        return lambda case, ranks: Llama3AllGather(
            kernel, ranks.group, stride, case.bounds, ranks.device, causal=case.causal
        )

    def ring(case: Case, ranks: Ranks) -> Scheme:
        return ring_of(kernel, Ring(ranks.group), case, ranks)

    def ulysses(case: Case, ranks: Ranks) -> Scheme:
        return Ulysses(ranks.group, Alone(kernel, whole_form(case, ranks.device)))

    def both(case: Case, ranks: Ranks) -> Scheme:
        inside, across = usp_groups(ranks.size)
        return Ulysses(inside, ring_of(kernel, Ring(across), case, ranks))

    gathers = only(*WHOLE_ROWS, even=True)
    return [
        of("zigzag_ring", ring, zigzag, only("causal")),
        of("zigzag_varlen_ring", ring, zigzag, only("packed")),
        of("full_ring", ring, zigzag, only("full", "packed full")),
        of("llama3_allgather", gather(0), contiguous, gathers),
        of("llama3_allgather 1", gather(1), contiguous, gathers),
        of("ulysses", ulysses, contiguous, only(*ONE_CALL, even=True, heads=True)),
        of("usp", both, usp_layout, usp_refuses),
    ]


def ring_of(kernel: Kernel, ring: Ring, case: Case, ranks: Ranks) -> Scheme:
    """The ring that suits a case; tokens lie zigzag over its ranks."""
    if not case.causal:
        return FullRing(kernel, ring, case.bounds if case.packed else None, ranks.device)
    if case.packed:
        return ZigzagVarlenRing(kernel, ring, case.bounds, ranks.device)
    return ZigzagRing(kernel, ring)


RINGS = 2  # ranks in a ring of USP's; the others share out heads


@lru_cache
def usp_groups(ranks: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's two groups: ranks that share out heads, which are neighbours, and the ring."""
    size, mine = ranks // RINGS, dist.get_rank()
    insides = [dist.new_group(list(range(n, n + size))) for n in range(0, ranks, size)]
    acrosses = [dist.new_group(list(range(n, ranks, size))) for n in range(size)]
    return insides[mine // size], acrosses[mine % size]


@lru_cache(maxsize=64)
def usp_layout(case: Case, ranks: int) -> Layout:
    """Zigzag over the ring; each part of it is cut over the ranks that share out heads."""
    rings, room = zigzag(case, RINGS), case.tokens // ranks
    cut = []
    for ring in range(RINGS):
        for own in np.split(rings.positions(ring), ranks // RINGS):
            starts = np.flatnonzero(np.diff(own, prepend=-2) != 1)
            stops = np.append(starts[1:], room)
            cut.append(list(zip(own[starts].tolist(), (own[stops - 1] + 1).tolist(), strict=True)))
    return Layout.from_ranges(cut)


def usp_refuses(case: Case, ranks: int) -> str | None:
    """Why USP cannot do a case, or None."""
    if ranks < 2 * RINGS or ranks % RINGS:
        return f"wants {2 * RINGS} ranks or more, a multiple of {RINGS}"
    size = ranks // RINGS
    if any(n % size for n in case.heads):
        return f"deals out heads, and {size} ranks do not divide {case.heads}"
    return only(*WHOLE_ROWS)(case, ranks)


def torch_rings(choice: Choice) -> list[Contestant]:
    """PyTorch's ring with cuDNN, by how keys move."""

    def of(name: str, rotate: str) -> Contestant:
        def make(case: Case, ranks: Ranks) -> Attention:
            return torch_cp.TorchRing(ranks.group, rotate, causal=case.causal)

        missing = torch_cp.missing(choice.device)
        refuses = only("causal", "full")
        return Contestant(name, "cudnn", make, zigzag, refuses, missing=missing)

    return [of("torch cp", "allgather"), of("torch cp alltoall", "alltoall")]


def te_rings(choice: Choice) -> list[Contestant]:
    """TransformerEngine's context parallelism, by how keys move."""

    def of(comm_type: str) -> Contestant:
        def make(case: Case, ranks: Ranks) -> Attention:
            return te_cp.attention(ranks.group, comm_type, case, ranks.device)

        kinds = [*WHOLE_ROWS] + ["window"] * (comm_type != "p2p")
        refuses = only(*kinds, heads=comm_type == "a2a")
        missing = te_cp.missing(choice.device)
        return Contestant(f"te {comm_type}", "te", make, zigzag, refuses, missing=missing)

    return [of(comm_type) for comm_type in ("p2p", "all_gather", "a2a")]


def installed(choice: Choice) -> list[Contestant]:
    """Peers' packages."""
    return [
        Contestant(
            name,
            "flash_attn",
            lambda case, ranks, make=make: make(ranks.group),  # type: ignore[misc]
            layout,
            only("causal", even=True, heads=name == "yunchang"),
            missing=packages.missing(name, choice.device),
        )
        for name, make, layout in (
            ("ring_flash_attn", packages.ring_flash_attn, zigzag),
            ("yunchang", packages.yunchang, contiguous),
        )
    ]
