"""Which rank holds which tokens of a call."""

from __future__ import annotations

from ..core.comm import Comm
from ..core.layout import Layout
from . import agreement
from .arguments import ArgumentError

# As a layout: Layout.zigzag by the call's cu_seqlens, which a graph knows only when it runs.
BY_DOCUMENT = "zigzag by document"


def layout_named(spec: str, total: int, ranks: int) -> Layout:
    """The layout of a text, or of the name of a kind over so many tokens and ranks."""
    block = ":1" if spec == "striped" else ""
    return Layout.parse(spec if ":" in spec else f"{spec}:{total}:{ranks}{block}")


def layout_of(op: str, comm: Comm, name: str, spec: str, local: int, total: int | None) -> Layout:
    """Where the tokens lie: ``spec`` if given, else ``total`` tokens (or, where only the local
    length is known, as many on every rank) contiguously.

    Args:
        name: what the argument is called, ``layout`` or ``k_layout``.
    """
    told = ""
    if not spec:
        if total is None:
            compare_lengths(op, comm, local)
        else:
            told = f", as the mask or cu_seqlens speak of {total} tokens in all"
        spec = f"contiguous:{local * comm.size if total is None else total}:{comm.size}"
    # The same object for the same text, so plans are found at once.
    layout = layout_named(spec, local * comm.size if total is None else total, comm.size)
    if layout.group_size != comm.size:
        raise ArgumentError(
            f"{op}: {name} {layout} is for {layout.group_size} ranks, but the group has {comm.size}"
        )
    if total is not None and layout.total != total:
        raise ArgumentError(
            f"{op}: {name} {layout} holds {layout.total} tokens, but the sequence has {total}"
        )
    if layout.sizes[comm.rank] != local:
        raise ArgumentError(
            f"{op}: rank {comm.rank} of {comm.size} holds {local} tokens, but {name} {layout} "
            f"gives it {layout.sizes[comm.rank]} (sizes {list(layout.sizes)}){told}; if the "
            f"sequence is cut otherwise, say so with {name}=Layout.from_sizes([...])"
        )
    return layout


def refuse_layouts_of_ranks(op: str, **layouts: Layout | None) -> None:
    """A graph is one rank's program, and an engine that cuts it gives calls their layouts."""
    for name, layout in layouts.items():
        if layout is not None and layout.group_size != 1:
            raise ArgumentError(
                f"{op}: {name}={layout} is for {layout.group_size} ranks, but the call has no "
                "process_group; under an engine that cuts the tokens leave it out: after "
                "wrap_shuffle_func or wrap_maybe_shuffle it tells attention their order"
            )


def compare_lengths(op: str, comm: Comm, local: int, remedy: str | None = None) -> None:
    """Without a layout a rank takes the others to hold as many tokens as itself; if they do not,
    messages are of other lengths than expected, and results wrong. So the first time that a
    length is met, the ranks tell each other theirs. In a correct program all ranks meet the same
    lengths in the same order, so none is left waiting. (In others one may be: a length that a rank
    has met and its peer has not. Ranks that compare every call do not depend on it.)

    Args:
        remedy: how to say what each rank holds; None: by a layout.
    """
    if comm.size == 1 or local in comm.common_lengths or agreement.enabled(comm):
        return  # where the ranks compare every call, they compare this too
    lengths = comm.all_gather_object(local)
    if len(set(lengths)) > 1:
        if remedy is None:
            remedy = (
                f"say so with layout=Layout.from_sizes({lengths}), or with the layout that they "
                "are cut by"
            )
        raise ArgumentError(f"{op}: the ranks of the group hold {lengths} tokens; {remedy}")
    comm.common_lengths.add(local)
