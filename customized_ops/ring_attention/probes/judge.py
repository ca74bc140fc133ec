"""Turns what all ranks saw into a verdict for each check."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.arrays import Ints
from ..core.mask import AttnMask
from . import causes
from .evidence import Evidence, Seen
from .failure import Failure
from .probe_report import Check, ProbeReport
from .shards import Shards

NAMES = ("runs", "tokens", "values", "loss", "gradients", "influence", "mask", "labels")


def failed_runs(failures: Sequence[Failure | None]) -> Check:
    """The failed check for errors of ranks. Ranks that only waited for a failed peer come last."""
    failed = {rank: each for rank, each in enumerate(failures) if each is not None}
    first = {rank: each for rank, each in failed.items() if not each.follows} or failed
    shown = "; ".join(each.of_rank(rank) for rank, each in first.items())
    who = "every rank" if len(first) == len(failures) else f"{len(first)} of {len(failures)} ranks"
    others = [rank for rank in failed if rank not in first]
    waited = f"; ranks {others} waited for peers, and stopped" if others else ""
    return Check("runs", "failed", f"{who} raised: {shown}{waited}")


def stopped(failed: Check) -> ProbeReport:
    """The report after a failure that rules out the remaining checks."""
    before = NAMES[: NAMES.index(failed.name)]
    rest = NAMES[len(before) + 1 :]
    passed = (Check(name, "passed", "on every rank") for name in before)
    left = (Check(name, "left out", f"not after {failed.name} failed") for name in rest)
    return ProbeReport((*passed, failed, *left))


def judge(evidence: Evidence, mask: AttnMask | None, layers: int) -> ProbeReport:
    """All checks of a model that ran."""
    return ProbeReport(
        (
            _runs(evidence),
            tokens(evidence.shards, evidence.seen, evidence.size),
            _values(evidence),
            _loss(evidence),
            _gradients(evidence),
            _influence(evidence),
            _mask(evidence, mask, layers),
            _labels(evidence),
        )
    )


def _runs(evidence: Evidence) -> Check:
    for rank, each in enumerate(evidence.seen):
        if each.finite[0] and not each.finite[1]:
            found = f"outputs of rank {rank} are not all numbers; alone they are"
            return Check("runs", "failed", found, "a row that attends to nothing, or an overflow")
    return Check("runs", "passed", "on every rank")


def tokens(shards: Shards, seen: Sequence[Seen], size: tuple[int, int]) -> Check:
    """Whether each token of the sequence has one output, or all outputs are on each rank."""

    def failed(found: str, cause: str = "") -> Check:
        return Check("tokens", "failed", found, cause)

    for rank, each in enumerate(seen):
        if (each.tokens_alone, each.rows) != (size[1], size[0]):
            return failed(
                f"the batch is {size[0]} x {size[1]}; alone has {each.tokens_alone} tokens, and "
                f"rank {rank} {each.rows} rows"
            )
        wrong = each.positions[(each.positions < -1) | (each.positions >= size[1])]
        if len(wrong):
            return failed(f"rank {rank} says position {wrong[0]} of {size[1]} tokens")
    held = shards.held()
    ranks = "ranks disagree on lengths or on the layout"
    if (held > 1).any():
        token = int(np.argmax(held > 1))
        having = [n for n, each in enumerate(shards.said) if (each == token).any()]
        return failed(f"token {token} is held {held[token]} times, on ranks {having}", ranks)
    if (held == 0).any():
        token, missing = int(np.argmax(held == 0)), int((held == 0).sum())
        return failed(f"token {token}, and {missing} in all, are on no rank", ranks)
    if shards.replicated and len(seen) > 1:
        return Check(
            "tokens", "passed", "every rank has the output of all; nothing says how shared"
        )
    sizes = [len(each) for each in shards.positions]
    return Check("tokens", "passed", f"each of {size[1]} on one rank; ranks have {sizes}")


def _at(evidence: Evidence, token: int) -> str:
    """A token described by its rank, its document and any shard border next to it."""
    text = f"token {token} (rank {evidence.shards.holder()[token]}"
    if evidence.documents is not None:
        text += f", document {evidence.document(token)}"
    borders = evidence.shards.borders()
    if token in borders:
        text += ", first after a shard border"
    elif token + 1 in borders:
        text += ", last before a shard border"
    return f"{text})"


def _values(evidence: Evidence) -> Check:
    error = evidence.error
    wrong = np.argwhere(~(error <= evidence.near).T)  # token first
    if not len(wrong):
        return Check("values", "passed", f"of all tokens, to {error.max(initial=0.0):.1e}")
    token, row = (int(n) for n in wrong[0])
    count = len(np.unique(wrong[:, 0]))
    found = (
        f"{count} of {evidence.size[1]} tokens differ; the first is {_at(evidence, token)}, by "
        f"{error[row, token]:.1e} where {evidence.near:.1e} is allowed"
    )
    return Check("values", "failed", found, causes.of_values(evidence))


def _loss(evidence: Evidence) -> Check:
    want, got = zip(*(each.losses for each in evidence.seen), strict=True)
    allowed = evidence.near_loss
    wrong = [n for n in range(len(got)) if not abs(got[n] - want[n]) <= allowed]
    if not wrong:
        return Check("loss", "passed", f"{got[0]:.6g}, as alone, on every rank")
    rank = wrong[0]
    found = f"rank {rank} has {got[rank]:.6g}, one process {want[rank]:.6g}"
    cause = causes.of_ratio(evidence, _ratio(got[rank], want[rank]), "the loss is")
    if np.isfinite(got).all() and max(got) - min(got) > allowed:
        cause = "ranks report losses of their own tokens: add up sums, and divide by the count"
    is_number = bool(np.isfinite(got).all())
    return Check("loss", "failed", found, _or_values(evidence, cause, is_number))


def _gradients(evidence: Evidence) -> Check:
    names = evidence.seen[0].gradients
    if not names:
        return Check("gradients", "left out", "the run alone has none")
    for rank, each in enumerate(evidence.seen):
        largest = max(g.largest for g in each.gradients.values())
        for name, g in each.gradients.items():
            if not g.error <= evidence.tolerance * max(largest, 1e-300):
                ratio = _ratio(each.product, each.square)
                found = (
                    f"of {name} on rank {rank}: off by {g.error:.1e} of {g.largest:.1e}; all are "
                    f"{ratio:.4g} times those of one process"
                )
                if np.isnan(g.product) and np.isinf(g.error):
                    found = f"of {name} on rank {rank}: missing, of another shape, or no number"
                cause = causes.of_ratio(evidence, ratio, "gradients are")
                if all(np.isfinite(g.error) for g in each.gradients.values()) and _differ(evidence):
                    cause = "gradients are not added up over the ranks, or not all of them"
                return Check(
                    "gradients", "failed", found, _or_values(evidence, cause, np.isfinite(ratio))
                )
    return Check("gradients", "passed", f"of {len(names)} parameters, on every rank")


def _ratio(a: float, b: float) -> float:
    return a / b if b else np.nan


def _differ(evidence: Evidence) -> bool:
    products = [each.product for each in evidence.seen]
    return bool(max(products) - min(products) > evidence.tolerance * max(map(abs, products)))


def _or_values(evidence: Evidence, cause: str, is_number: bool) -> str:
    """``cause``, unless wrong outputs or misplaced labels already explain the failure."""
    if not is_number:
        return cause
    if _values(evidence).verdict == "failed":
        return "see values"
    return "see labels" if causes.of_labels(evidence) else cause


def _influence(evidence: Evidence) -> Check:
    found = causes.differences(evidence)
    if not found:
        places = [trial.place for trial in evidence.trials]
        return Check("influence", "passed", f"of tokens {places} reaches the same tokens as alone")
    text = _shown(evidence, found)
    return Check("influence", "failed", text, causes.of_influence(evidence, found))


def _shown(evidence: Evidence, found: Sequence[causes.Difference]) -> str:
    first = found[0]
    verb = "changes, and alone it does not" if first.is_extra else "does not change; alone it does"
    where = f"{_at(evidence, first.token)} of row {first.row}"
    changed = f"{_at(evidence, first.trial.place)} of row {first.trial.row}"
    kinds = sum(each.is_extra for each in found)
    return (
        f"where {changed} changes, {where} {verb}; in all {kinds} too many and "
        f"{len(found) - kinds} missing"
    )


def _mask(evidence: Evidence, mask: AttnMask | None, layers: int) -> Check:
    if mask is None:
        return Check("mask", "left out", "no mask was given; influence is compared with alone")
    dense = mask.to_dense()
    for trial in evidence.trials:
        reached: Ints = np.arange(evidence.size[1]) == trial.place
        for _ in range(layers):
            reached = reached | dense[:, reached].any(1)
        changed = trial.parallel[trial.row] > evidence.loud
        wrong = np.flatnonzero(changed != reached)
        if len(wrong):
            token = int(wrong[0])
            verb = "changes, and the mask keeps it apart" if changed[token] else "does not change"
            found = (
                f"where {_at(evidence, trial.place)} changes, {_at(evidence, token)} {verb}; in "
                f"all {int((changed & ~reached).sum())} too many and "
                f"{int((reached & ~changed).sum())} missing"
            )
            same = _influence(evidence).verdict == "passed"
            text = "the model alone has another mask, too, or another number of layers"
            return Check("mask", "failed", found, text if same else "see influence")
    return Check("mask", "passed", f"through {layers} layers, of {len(evidence.trials)} tokens")


def _labels(evidence: Evidence) -> Check:
    if not any(label.want or label.got for label in evidence.labels):
        return Check("labels", "left out", "the batch has none, or none of those tried counts")
    misplaced = causes.misplaced_labels(evidence)
    for label in evidence.labels:
        shown = label.place in misplaced or not misplaced
        for rank, (want, got) in enumerate(label.losses if shown else ()):
            if not evidence.counts_alike(want, got):
                found = (
                    f"where the label at {_at(evidence, label.place)} changes, the loss of rank "
                    f"{rank} changes by {got:.3g}, alone by {want:.3g}"
                )
                return Check("labels", "failed", found, _cause_of_labels(evidence))
    return Check("labels", "passed", f"of tokens {[each.place for each in evidence.labels]} count")


def _cause_of_labels(evidence: Evidence) -> str:
    if causes.are_unread(evidence):
        return causes.UNREAD_LABELS
    if _values(evidence).verdict == "failed":  # wrong values also change what a label counts
        return "see values"
    if cause := causes.of_labels(evidence):
        return cause
    failed = _loss(evidence).verdict == "failed"
    return "see loss" if failed else "labels are cut otherwise than tokens"
