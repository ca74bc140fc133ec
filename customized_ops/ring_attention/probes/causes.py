"""The likely cause of what probes found, in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .evidence import Evidence, Label, Trial

MISPLACED_LABELS = (
    "labels at shard borders are lost, or are those of other tokens: labels are shifted after the "
    "batch is cut. Shift first, then cut"
)
UNREAD_LABELS = (
    "the loss over the group does not depend on the batch's labels: its labels are made of "
    "something else, such as the tokens. Cut those of the batch that the function is given"
)
SCALE_FITS = 1e-3  # how close a ratio must be to a number of ranks to be taken for it


class Difference(NamedTuple):
    """An output that changed with a token although it should not, or the reverse."""

    trial: Trial
    row: int
    token: int
    is_extra: bool


def differences(evidence: Evidence) -> list[Difference]:
    """The differences in all trials."""
    found = []
    for trial in evidence.trials:
        for each, is_extra in ((evidence.extra(trial), True), (evidence.lost(trial), False)):
            found += [Difference(trial, int(row), int(token), is_extra) for row, token in each]
    return found


def of_influence(evidence: Evidence, found: Sequence[Difference]) -> str:
    """Why outputs changed that should not have, or did not change although they should have."""
    extra = [each for each in found if each.is_extra]
    lost = [each for each in found if not each.is_extra]
    if not extra:
        return _of_lost(evidence, lost)
    if any(each.row != each.trial.row for each in extra):
        return "rows of the batch are mixed: a view or strides that the op does not read"
    if _is_causal(evidence) and any(each.token < each.trial.place for each in extra):
        last = {each.trial.place for each in extra} <= _last_tokens(evidence)
        if last and not lost:
            return "an index −1 (padding, or the token before the first) reads the last token"
        return (
            "tokens stand in another order than the op takes them to: shards of another layout, "
            "or strides that are not read"
        )
    if all(_crosses_documents(evidence, each) for each in extra):
        if lost:
            return (
                "documents end elsewhere: cu_seqlens of padded lengths taken for the real ones, "
                "or the reverse"
            )
        return (
            "borders of documents are dropped, or are those of padded lengths: no cu_seqlens "
            "reaches attention, or another than the batch's"
        )
    if lost:
        return "tokens are taken for others: another layout, another mask, or strides not read"
    return (
        "the mask is lost: a window, chunk or other limit does not reach attention, as where a "
        "kernel that lacks it is taken, or a combination that is not supported is ignored"
    )


def _of_lost(evidence: Evidence, lost: Sequence[Difference]) -> str:
    holder = evidence.shards.holder()
    if all(holder[each.token] != holder[each.trial.place] for each in lost):
        crossed = [trial for trial in evidence.trials if _reaches_others(evidence, trial)]
        if not crossed and not evidence.shards.replicated:
            return (
                "attention stays inside each rank's shard: parallelism is off, without a word "
                "(no group, a group of one, or an attention that was not replaced)"
            )
        return "some keys of other ranks never arrive, or the halo of a window is too short"
    starts = set(evidence.documents or (0,))
    if {each.trial.place for each in lost} <= starts:
        return "first tokens of sequences, which all see (sinks), are not attended"
    return "the mask is narrower than the model's: another window, chunk or document border"


def _reaches_others(evidence: Evidence, trial: Trial) -> bool:
    holder = evidence.shards.holder()
    changed = (trial.parallel > evidence.loud).any(0)
    return bool((changed & (holder != holder[trial.place])).any())


def _crosses_documents(evidence: Evidence, each: Difference) -> bool:
    return evidence.document(each.token) != evidence.document(each.trial.place)


def _is_causal(evidence: Evidence) -> bool:
    trials = evidence.trials
    return not any((each.alone[:, : each.place] > evidence.quiet).any() for each in trials)


def _last_tokens(evidence: Evidence) -> set[int]:
    """The last token of the sequence and of each rank's shard."""
    ends = [int(each[-1]) for each in evidence.shards.positions if len(each)]
    return {evidence.size[1] - 1, *ends}


def of_values(evidence: Evidence) -> str:
    """Why outputs differ although each token reaches the tokens that it should."""
    if differences(evidence):
        return "see influence"
    if evidence.local_positions is not None and evidence.local_positions <= evidence.near:
        return (
            "position ids or rotary angles begin anew at shard borders: outputs are those of the "
            "model alone with such positions"
        )
    wrong = np.any(evidence.error > evidence.near, axis=0)
    first, borders = int(np.flatnonzero(wrong)[0]), evidence.shards.borders()
    if first in borders:
        return (
            "position ids or rotary angles do not go on across shard borders: all is right up to "
            "the first"
        )
    starts = [n for n in evidence.documents or (0,) if n < evidence.size[1]]
    if _is_causal(evidence) and not wrong[starts].any():
        return (
            "attention's scale, softcap or bias is lost, as in a fallback kernel: first tokens of "
            "sequences, which attend to themselves alone, are right"
        )
    return (
        "sinks are lost (in a model with sinks, also scale or softcap), or what is before "
        "attention differs (strides, weights, dropout): first tokens of sequences are wrong, too"
    )


def of_ratio(evidence: Evidence, ratio: float, what: str) -> str:
    """Why a loss or gradients are ``ratio`` times those of one process; empty if the ratio is 1."""
    ranks = len(evidence.seen)
    if not np.isfinite(ratio):
        return (
            "a rank divides 0 by 0: it has no tokens or no labels of its own. Divide the sum of "
            "all ranks by the count of all"
        )
    if abs(ratio / ranks - 1) < SCALE_FITS:
        return f"{what} added up over {ranks} ranks, where it is whole or a mean on each already"
    if abs(ratio * ranks - 1) < SCALE_FITS:
        return (
            f"{what} divided by the {ranks} ranks once too often: averaged, as DDP and FSDP do, "
            "where shares are to be added up"
        )
    if (factor := evidence.common_factor) is not None:
        return (
            f"loss scale: the loss and all gradients are {factor:.6g} times those of one process, "
            "as where a sum is divided by another count of tokens"
        )
    if abs(ratio - 1) < SCALE_FITS:
        return ""
    means = (
        f"{what} of ranks with different numbers of labels averaged: add up sums, and divide by "
        "the count of all ranks"
    )
    if evidence.tried_borders:
        return means
    return (
        f"{means}; or labels are shifted after the batch is cut, and wrong at shard borders. To "
        "know which, give the batch its labels, and leave out places"
    )


def of_labels(evidence: Evidence) -> str:
    """What is wrong with the labels themselves; empty if nothing points to them."""
    if are_unread(evidence):
        return UNREAD_LABELS
    return MISPLACED_LABELS if misplaced_labels(evidence) else ""


def are_unread(evidence: Evidence) -> bool:
    """Whether no label changes the loss over the group, not even labels inside shards."""
    starts = {0, *evidence.shards.borders()}
    silent = all(got == 0 for label in evidence.labels for _, got in label.losses)
    return silent and any(
        label.place not in starts and not evidence.counts_alike(label.want, label.got)
        for label in evidence.labels
    )


def misplaced_labels(evidence: Evidence) -> list[int]:
    """Places right after shard borders whose labels count differently than alone; empty if labels
    at other places do so, too.

    A mean over a rank's own labels weighs all of them by the same other factor, which the labels
    inside the shard reveal.
    """
    holder, borders = evidence.shards.holder(), evidence.shards.borders()
    starts = {0, *borders}
    weighed: dict[int, list[float]] = {}
    for label in evidence.labels:
        if label.place not in starts and abs(label.want) > evidence.near_loss:
            weighed.setdefault(holder[label.place], []).append(label.got / label.want)
    factors = {rank: float(np.median(each)) for rank, each in weighed.items()}

    def fits(label: Label) -> bool:
        # A label is predicted at the row before it, on the rank that holds that row.
        of_ranks = (factors.get(holder[label.place - n], 1.0) for n in (0, 1))
        return any(evidence.counts_alike(f * label.want, label.got) for f in (1.0, *of_ranks))

    wrong = [label.place for label in evidence.labels if not fits(label)]
    return [place for place in wrong if place in borders] if starts.issuperset(wrong) else []
