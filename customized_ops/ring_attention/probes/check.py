"""The one function that users call: it runs both models, and judges what all ranks saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from annotations.consistency import described, digest
from annotations.waiting import tell

from ..core.comm import Comm
from ..core.comm.comm_groups import GroupLike, group_comm
from ..core.mask import AttnMask
from ..op.arguments import agree, is_integer, require
from . import changed_batches, judge
from .evidence import Evidence, Label, Seen, Trial, errors, seen_of
from .failure import Failure
from .model_run import PADDING, Floats, ModelRun, Step, distance, require_same_tokens
from .probe_report import Check, ProbeReport
from .shards import Shards, telling_places

OP = "check_parallel_model"
Batch = Mapping[str, Any]
T = TypeVar("T")
Model = Callable[[Batch], ModelRun]


def check_parallel_model(
    alone: Model,
    parallel: Model,
    batch: Batch,
    group: GroupLike,
    *,
    tokens: str = "input_ids",
    labels: str | None = "labels",
    position_ids: str | None = "position_ids",
    documents: Sequence[int] | None = None,
    mask: AttnMask | None = None,
    layers: int = 1,
    places: Sequence[int] | None = None,
    tolerance: float | None = None,
) -> ProbeReport:
    """Compare a model over the ranks of a group with the same model alone. Every rank calls this.

    Both models are run on the batch twice, which shows their noise. Then they are run on batches
    with one token changed, where outputs of the same tokens must change in both; then on batches
    with one label changed. Dropout must be off, and parameters must not change from run to run.

        runs        both models make their steps on every rank, and values are numbers
        tokens      the output of each token is on exactly one rank, or all outputs are on each
        values, loss, gradients    are those of one process
        influence   a changed token reaches the same tokens as alone
        mask        a changed token reaches the tokens that the mask allows, through all layers
        labels      of tokens beside shard borders count the same as alone

    Args:
        alone: one step of the whole model on one process, without peers. Each rank runs it.
        parallel: the same step over the group. It receives the whole batch.
        batch: whole tensors by name, the same on every rank.
        group: a ProcessGroup, its global ranks in increasing order, or a Comm.
        tokens: the entry to change: integers [b, l] or [l], or embedded, [b, l, d].
        labels: the entry of labels, shaped like tokens; labels below 0 are ignored. Labels are left
            out if this is None, or if the batch has no such entry; so are position_ids.
        position_ids: the entry whose values are exchanged to explain wrong values.
        documents: cumulative lengths of packed documents, from 0 to l, for places and explanations.
        mask: of l tokens, which tokens attend to which; each token must also reach itself.
        layers: how many times the mask is applied, one after the other.
        places: tokens to change; if None, the first and the last, and those on either side of
            borders of documents and shards, 16 at most.
        tolerance: largest difference of values over the largest value; if None 1e-10 for fp64
            outputs, 1e-4 for fp32 and 5e-2 for others.
    Returns:
        The same verdicts on every rank. If a step raised, the group cannot be used afterwards.
    Raises:
        ArgumentError: an argument does not fit, or is not the same on every rank
            (:class:`.DisagreementError`).
    """
    comm = group_comm(group)
    entries = {"tokens": tokens, "labels": labels, "position_ids": position_ids}
    told: dict[str, Any] = {"documents": documents, "mask": mask, "layers": layers}
    told |= {"places": places, "tolerance": tolerance}
    with comm.beside() as beside:
        names, size = _agreed(beside, batch, entries, told)
        probing = _Probing(alone, parallel, comm, beside)
        try:
            evidence = _gather(probing, batch, names, size, documents, places, tolerance)
        except _Stopped as stopped:
            return judge.stopped(stopped.check)
        return judge.judge(evidence, mask, layers)


def _agreed(
    beside: Comm, batch: Batch, entries: Mapping[str, Any], told: Mapping[str, Any]
) -> tuple[_Names, tuple[int, int]]:
    """The entries to change, and the rows and tokens of the batch. Raises on every rank if an
    argument does not fit on one of them, or is not the same on all."""
    problem: Exception | None = None
    facts: dict[str, str] = {}
    try:
        require(isinstance(batch, Mapping), OP, "batch", "a mapping of tensors by name", batch)
        found = (_in(batch, entries[name]) for name in ("labels", "position_ids"))
        names = _Names(entries["tokens"], *found)
        size = _checked(names, batch, **told)
        facts = {name: described(value) for name, value in {**entries, **told}.items()}
        facts |= {f"batch[{name!r}]": _fact(value) for name, value in batch.items()}
    except Exception as error:
        problem = error
    agree(OP, beside, facts, problem)
    if problem is not None:
        raise problem
    return names, size


def _in(batch: Batch, name: str | None) -> str | None:
    return name if name is not None and batch.get(name) is not None else None


def _fact(value: Any) -> str:
    return digest(value) if hasattr(value, "shape") else repr(value)


def _checked(
    names: _Names,
    batch: Batch,
    documents: Sequence[int] | None,
    mask: AttnMask | None,
    layers: int,
    places: Sequence[int] | None,
    tolerance: float | None,
) -> tuple[int, int]:
    """Check all arguments; returns the numbers of rows and tokens of the batch."""
    tokens = names.tokens
    require(batch.get(tokens) is not None, OP, "tokens", f"one of {sorted(batch)}", tokens)
    rows, count = changed_batches.rows_and_tokens(OP, tokens, batch[tokens])
    for name in filter(None, (names.labels, names.position_ids)):
        fits = isinstance(batch[name], Tensor)
        require(fits, OP, f"batch[{name!r}]", "a tensor", batch[name])
        shape = tuple(batch[name].shape)
        of_labels = name == names.position_ids or shape in ((rows, count), (count,))
        fits = bool(shape) and shape[-1] == count and of_labels
        require(fits, OP, f"batch[{name!r}]", f"of {rows} rows of {count} tokens", shape)
    fits = tolerance is None or (isinstance(tolerance, float | int) and tolerance > 0)
    require(fits, OP, "tolerance", "above 0, or None", tolerance)
    require(is_integer(layers, 1), OP, "layers", "a number of layers, 1 or more", layers)
    for name, given in (("documents", documents), ("places", places)):
        fits = given is None or isinstance(given, Iterable)
        require(fits, OP, name, "a list of integers, or None", given)
    if documents is not None:
        ends = [int(n) for n in documents]
        fits = bool(ends) and ends[0] == 0 and ends[-1] == count and ends == sorted(ends)
        require(fits, OP, "documents", f"lengths added up, from 0 to {count}", ends)
    require(mask is None or isinstance(mask, AttnMask), OP, "mask", "an AttnMask, or None", mask)
    if mask is not None:
        lengths = (mask.q_len, mask.k_len)
        require(lengths == (count, count), OP, "mask", f"of {count} tokens", lengths)
    for place in () if places is None else places:
        fits = is_integer(place) and place < count
        require(fits, OP, "places", f"tokens from 0 to {count - 1}", place)
    return rows, count


class _Stopped(Exception):
    """A check failed that the other checks depend on."""

    def __init__(self, check: Check) -> None:
        super().__init__(check.found)
        self.check = check


@dataclass(frozen=True)
class _Names:
    """Names of entries of the batch; None where the batch has no such entry."""

    tokens: str
    labels: str | None
    position_ids: str | None


@dataclass(frozen=True)
class _Probing:
    """Both models of this rank, and what connects it with its peers."""

    alone: Model
    parallel: Model
    comm: Comm
    beside: Comm

    def both(self, batch: Batch, like: tuple[Step, Step] | None = None) -> tuple[Step, Step]:
        """A step alone and a step over the group, of the same tokens as ``like``; raises
        :class:`_Stopped` on every rank if a step failed on any rank."""

        def steps() -> tuple[Step, Step]:
            found = self._alone(batch), Step.of(self.parallel(batch), "parallel")
            for who, step, base in zip(("alone", "parallel"), found, like or found, strict=True):
                require_same_tokens(who, step, base)
            return found

        return self._on_every_rank(steps)

    def only_alone(self, batch: Batch) -> Step:
        """A step alone."""
        return self._on_every_rank(lambda: self._alone(batch))

    def _alone(self, batch: Batch) -> Step:
        return Step.of(self.alone(batch), "alone")

    def _on_every_rank(self, function: Callable[[], T]) -> T:
        failure = None
        try:
            result = function()
        except Exception as error:
            failure = Failure.of(error)
            # Tell waiting peers where it failed: the op that began last may have ended well.
            self.comm.now = f"a step of {OP}{failure.where}"
            self.comm.give_up(error)
            if not failure.follows:
                # A peer that waits in a collective of torch.distributed does not learn of the
                # failure, and the report, which has all ranks' errors, waits for that peer.
                said = failure.of_rank(self.comm.rank)
                self.beside.now = f"{OP}, after {said}"
                if self.beside.is_first("failure"):
                    tell(f"{OP}: {said}")
        failures = self.beside.all_gather_object(failure)
        if any(failures):
            raise _Stopped(judge.failed_runs(failures))
        return result


def _changes(steps: tuple[Step, Step], base: tuple[Step, Step]) -> tuple[Floats, Floats]:
    """For both models, how far each token's output [b, l] is from the one for the batch itself."""
    return distance(steps[0].output, base[0].output), distance(steps[1].output, base[1].output)


def _gather(
    probing: _Probing,
    batch: Batch,
    names: _Names,
    size: tuple[int, int],
    documents: Sequence[int] | None,
    places: Sequence[int] | None,
    tolerance: float | None,
) -> Evidence:
    """Gather what all ranks saw; the result is the same on every rank."""
    everyone = probing.beside.all_gather_object
    base = alone, parallel = probing.both(batch)
    noise = [float(each.max(initial=0.0)) for each in _changes(probing.both(batch, base), base)]
    seen: list[Seen] = everyone(seen_of(alone, parallel, noise))
    shards = Shards([each.positions for each in seen], size[1])
    if (wrong := judge.tokens(shards, seen, size)).verdict == "failed":
        raise _Stopped(wrong)
    ends = None if documents is None else [int(n) for n in documents]
    at = telling_places(shards, ends) if places is None else list(places)
    trials = []
    for n, place in enumerate(at):
        row = n % size[0]
        changed = changed_batches.with_another(batch, names.tokens, row, place)
        found = everyone(_changes(probing.both(changed or batch, base), base))
        whole = shards.whole([each for _, each in found], size)
        trials.append(Trial(place, row, found[0][0], whole))
    of_labels = []
    for n, place in enumerate(at if names.labels else ()):
        changed = changed_batches.with_another(batch, names.labels or "", n % size[0], place)
        if changed is not None:
            steps = probing.both(changed, base)
            losses = everyone((steps[0].loss - alone.loss, steps[1].loss - parallel.loss))
            of_labels.append(Label(place, losses))
    local = None
    if names.position_ids is not None and not shards.replicated:
        moved = probing.only_alone(
            changed_batches.with_local_positions(batch, names.position_ids, shards)
        )
        far = errors(parallel, moved)[:, parallel.positions != PADDING]
        local = max(everyone(float(far.max(initial=0.0))))
    allowed = seen[0].tolerance if tolerance is None else tolerance
    return Evidence(size, shards, ends, seen, tuple(trials), tuple(of_labels), local, allowed)
