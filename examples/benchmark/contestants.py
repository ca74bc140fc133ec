"""Who is measured: this package's ops, one GPU alone, and the peers.

Each attends [1, l, heads, d] through autograd; what a rank is given lies as its ``layout`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from customized_ops.ring_attention import Layout

from .cases import Case
from .ops import Op, recommended
from .peers import packages, te_cp, torch_cp
from .peers.kernels import KERNELS, Form, Kernel
from .peers.llama3_allgather import Llama3AllGather
from .peers.ring import Ring
from .peers.scheme import Scheme, attend
from .peers.ulysses import Ulysses
from .peers.zigzag_ring import ZigzagRing
from .peers.zigzag_varlen_ring import ZigzagVarlenRing
from .ranks import Ranks

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contestant:
    """One way to compute a case.

    Attributes:
        kernel: what computes on a device, for the table.
        make: its attention for a case on this rank; raises what is wrong.
        layout: which tokens each of so many ranks holds.
        refuses: why it cannot do a case over so many ranks, or None.
        whole: whether each rank computes all of it alone: the baseline.
        missing: why it does not run on this machine, or None.
    """

    name: str
    kernel: str
    make: Callable[[Case, Ranks], Attention]
    layout: Callable[[Case, int], Layout]
    refuses: Callable[[Case, int], str | None] = lambda case, ranks: None
    whole: bool = False
    missing: str | None = None


@dataclass(frozen=True)
class Choice:
    """Of a run: what contestants are made with."""

    device: torch.device
    kernel: str = "auto"
    reduce_dtype: torch.dtype | None = None
    deterministic: bool = False
    fa2: bool = False
    single: tuple[str, ...] = ("auto",)
    extra: tuple[Contestant, ...] = field(default=())


def contestants(choice: Choice) -> list[Contestant]:
    """All that there are, those not installed too."""
    return [*ours(choice), *single(choice), *peers(choice), *choice.extra]


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
            scheme = Alone(kernel, whole_form(case, ranks.device))
            return lambda q, k, v: attend(scheme, q, k, v)

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
        def make(case: Case, ranks: Ranks) -> Attention:
            made = scheme(case, ranks)
            return lambda q, k, v: attend(made, q, k, v)

        title = f"{name} fa2" if kernel.name == "fa2" else name
        return Contestant(title, kernel.name, make, layout, refuses, missing=missing)

    def gather(stride: int) -> Callable[[Case, Ranks], Scheme]:
        return lambda case, ranks: Llama3AllGather(
            kernel, ranks.group, stride, case.bounds, ranks.device
        )

    return [
        of(
            "zigzag_ring",
            lambda case, ranks: ZigzagRing(kernel, Ring(ranks.group)),
            zigzag,
            only("causal"),
        ),
        of(
            "zigzag_varlen_ring",
            lambda case, ranks: ZigzagVarlenRing(
                kernel, Ring(ranks.group), case.bounds, ranks.device
            ),
            zigzag,
            only("packed"),
        ),
        of("llama3_allgather", gather(0), contiguous, only("causal", "packed", even=True)),
        of("llama3_allgather 1", gather(1), contiguous, only("causal", "packed", even=True)),
        of(
            "ulysses",
            lambda case, ranks: Ulysses(kernel, ranks.group, whole_form(case, ranks.device)),
            contiguous,
            only("causal", "packed", "window", even=True, heads=True),
        ),
    ]


def torch_rings(choice: Choice) -> list[Contestant]:
    """PyTorch's ring with cuDNN, by how keys move."""

    def of(name: str, rotate: str) -> Contestant:
        def make(case: Case, ranks: Ranks) -> Attention:
            scheme = torch_cp.TorchRing(ranks.group, rotate)
            return lambda q, k, v: attend(scheme, q, k, v)

        missing = torch_cp.missing(choice.device)
        return Contestant(name, "cudnn", make, zigzag, only("causal"), missing=missing)

    return [of("torch cp", "allgather"), of("torch cp alltoall", "alltoall")]


def te_rings(choice: Choice) -> list[Contestant]:
    """TransformerEngine's, by how keys move."""

    def of(comm_type: str) -> Contestant:
        def make(case: Case, ranks: Ranks) -> Attention:
            packed = case.kind == "packed"
            return te_cp.attention(
                ranks.group, comm_type, case.bounds, case.window, packed, ranks.device
            )

        kinds = ["causal", "packed"] + ["window"] * (comm_type != "p2p")
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


class Alone:
    """One kernel call on a whole sequence, as a scheme."""

    def __init__(self, kernel: Kernel, form: Form) -> None:
        self.kernel, self.form = kernel, form

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See :class:`~.peers.scheme.Scheme`."""
        out, lse = self.kernel.forward(q, k, v, self.form)
        return out, (q, k, v, out, lse)

    def backward(self, dout: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~.peers.scheme.Scheme`."""
        return self.kernel.backward(dout, *saved, self.form)


def device_kernels(choice: Choice) -> list[Kernel]:
    """Those that peers are run with."""
    if choice.device.type == "cpu":
        return [KERNELS["plain"]]
    return [KERNELS["flash4"]] + [KERNELS["fa2"]] * choice.fa2


def whole_form(case: Case, device: torch.device) -> Form:
    """One call for a whole case."""
    if case.kind != "packed":
        return Form(causal=True, window=case.window)
    return Form.packed(case.bounds, case.bounds, device, causal=True)


def only(*kinds: str, even: bool = False, heads: bool = False) -> Callable[[Case, int], str | None]:
    """Refuses all but these kinds; tokens that do not divide (zigzag, or ``even``: contiguously),
    and with ``heads`` heads that do not.
    """

    def refuses(case: Case, ranks: int) -> str | None:
        if case.kind not in kinds:
            return f"knows {', '.join(kinds)} masks"
        parts = ranks if even else 2 * ranks
        lengths = [case.tokens] if even else [b - a for a, b in pairwise(case.bounds)]
        if any(n % parts for n in lengths):
            return f"wants lengths that {parts} divides"
        if heads and any(n % ranks for n in case.heads):
            return f"deals out heads, and {ranks} ranks do not divide {case.heads}"
        return None

    return refuses


def _no_library_call(case: Case, ranks: int) -> str | None:
    if case.kind in ("causal", "packed", "window"):
        return None
    return "the library has no single call for this mask"


def contiguous(case: Case, ranks: int) -> Layout:
    """Tokens as they come."""
    return Layout.contiguous(case.tokens, ranks)


def zigzag(case: Case, ranks: int) -> Layout:
    """2 P chunks of the sequence, or of each document."""
    bounds = case.bounds if case.kind == "packed" else None
    return Layout.zigzag(case.tokens, ranks, bounds)


def alone(case: Case, ranks: int) -> Layout:
    """All of it."""
    return Layout.contiguous(case.tokens, 1)
