"""One case: every contestant is checked, then they take turns."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from tqdm import tqdm

from benchmark.cases import Case, K
from benchmark.compete.checking import Sample, both_passes, is_fine, largest
from benchmark.compete.expected import (
    LONG_RUNS,
    OURS,
    baseline_runs,
    for_one_gpu,
    is_long,
    refusal,
    short_title,
)
from benchmark.compete.problem import Problem
from benchmark.contestant import Attention, Contestant, alone
from benchmark.measure.account import Account, Watch, comm_of
from benchmark.measure.account import table as accounts
from benchmark.measure.graph import Captured
from benchmark.measure.timing import Runner, first_run, take_turns
from benchmark.ops import Op
from benchmark.ranks import Ranks
from benchmark.show.rows import Row, heading, row_of, table

COMPARED = 256 * K  # tokens; beyond this, only sampled rows are compared, to save memory


class Match:
    """A case and its contestants.

    Attributes:
        rows: one per contestant, by name; graphs after the others.
        refused: why a contestant cannot do this case, by name.
        attentions, runners: of contestants with correct results, by name.
        ideal: best times of one GPU, by pass, and "cycles", divided by the number of ranks.
        baselines: ideals of smaller cases, by their heading; kept from case to case.
    """

    def __init__(
        self,
        case: Case,
        everyone: list[Contestant],
        args: argparse.Namespace,
        ranks: Ranks,
        baselines: dict[str, tuple[dict[str, float], str]],
    ) -> None:
        self.case, self.args, self.ranks = case, args, ranks
        self.baselines = baselines
        self.long = is_long(case, args)
        self.dtype = getattr(torch, args.dtype)
        self.everyone = [c for c in everyone if c.missing is None]
        self.rows: dict[str, Row] = {}
        self.refused: dict[str, str] = {}
        self.attentions: dict[str, Attention] = {}
        self.runners: dict[str, Runner] = {}
        self.watches: dict[str, Watch] = {}
        self.ideal: dict[str, float] = {}
        self.how = "no baseline"

    def play(self) -> None:
        """Measure all contestants."""
        made = self.ranks.attempt(self._make)
        if made.failure:
            self.how = f"nothing measured: {made.failure}"
            return
        for c in sorted(self.everyone, key=lambda c: not c.whole):  # baselines first
            self._enter(c)
        del self.right, self.sample
        self.problem.whole = ()  # all have their shards
        self._enter_graphs()
        self._measure()
        self._shares()
        for c in self.everyone:
            if c.name in self.runners and c.name.startswith(OURS):
                self._new_length(c)
                self._account(c)

    def report(self) -> str:
        """The table as text to read."""
        rows = list(self.rows.values())
        tables = table(rows), accounts(rows)
        said = "\n\n".join(text for text in tables if text)
        return heading(self.case, self.ideal, self.how) + said + self._refusals()

    def _refusals(self) -> str:
        why = [f"{name} ({reason})" for name, reason in self.refused.items()]
        return f"\nnot here: {'; '.join(why)}" if why else ""

    def _make(self) -> None:
        self.problem = Problem(self.case, self.ranks, self.dtype, self.args.seed)
        self.sample = Sample.of(self.case, self.problem.whole, self.ranks.size)
        self.right: tuple[Tensor, ...] | None = None

    def _enter(self, c: Contestant) -> None:
        """Make a contestant's attention and check it."""
        why = refusal(self.case, c, self.args, self.ranks.size)
        if why is not None:
            self.refused[c.name] = why
            return
        row = self.rows[c.name] = row_of(self.case, c, self.dtype, self.ranks.size)
        outcome = self.ranks.attempt(partial(self._check, c, row))
        if outcome.failure:
            row.note = f"failed: {outcome.failure}"
        elif row.checked is None or not is_fine(row.checked, self.dtype):
            row.note = f"WRONG: relative error and worst row {row.checked}"
        else:
            self.attentions[c.name] = outcome.value
            shards = self.problem.shards(c)
            self.runners[c.name] = Runner.of(c.name, outcome.value, shards)
            row.local_bytes = self.problem.local_bytes(c)

    def _check(self, c: Contestant, row: Row) -> Attention:
        """A contestant's attention, after both comparisons of ``checking``."""
        layout, rank = self.problem.layout(c)
        row.layout = str(layout)
        attention, shards = c.make(self.case, self.ranks), self.problem.shards(c)
        row.checked = self.sample.errors(self.ranks, attention, shards, layout, rank)
        if self.case.tokens > COMPARED or self.long or not is_fine(row.checked, self.dtype):
            return attention
        given = both_passes(attention, shards, self.ranks)
        if self.right is None and c.whole:
            self.right = given
        elif self.right is not None:
            right = (layout.shard(t, rank) for t in self.right)
            errors = largest(self.ranks, given, list(right))
            row.checked = [max(pair) for pair in zip(row.checked, errors, strict=True)]
        return attention

    def _enter_graphs(self) -> None:
        """This package's ops as CUDA graphs."""
        if not (self.args.cuda_graph and self.ranks.cuda):
            return
        for c in [c for c in self.everyone if c.name in self.runners and c.name.startswith(OURS)]:
            base = self.rows[c.name]
            row = row_of(self.case, c, self.dtype, self.ranks.size)
            row.contestant, row.layout = f"{c.name} graph", base.layout
            row.local_bytes = base.local_bytes
            self.rows[row.contestant] = row
            shards = self.problem.shards(c)
            outcome = self.ranks.attempt(partial(Captured, self.attentions[c.name], shards))
            if outcome.failure:
                row.note = f"failed: {outcome.failure}"
                continue
            row.note, row.checked = outcome.value.compare(self.ranks)
            if is_fine(row.checked, self.dtype):
                name = row.contestant
                self.runners[name] = Runner(name, outcome.value.step)
            else:
                row.note = f"WRONG: {row.checked}; {row.note}"

    def _measure(self) -> None:
        """Times and memory of the contestants that are ready."""
        round_ms = 0.0
        for name, runner in list(self.runners.items()):
            op = self.attentions.get(name)
            mark = Watch(self.ranks.cuda, comm_of(op)) if isinstance(op, Op) else None
            outcome = self.ranks.attempt(partial(first_run, runner, self.ranks, mark))
            if outcome.failure:
                self.rows[name].note = f"failed: {outcome.failure}"
                del self.runners[name]
                continue
            if mark is not None:
                self.watches[name] = mark
            self.rows[name].peak_bytes = outcome.value[1] or None
            round_ms += outcome.value[0]
        args, runners = self.args, list(self.runners.values())
        in_time = int(1e3 * args.case_seconds / max(round_ms, 1e-3))
        runs = max(min(args.least_runs, args.runs), min(args.runs, in_time))
        if self.long:
            runs = min(args.runs, LONG_RUNS, in_time)
        if not self.long or runs > 1:  # otherwise the first run is the only one
            turns = partial(take_turns, runners, self.ranks, runs, args.lead_ms, self._progress)
            outcome = self.ranks.attempt(turns)
            if outcome.failure:
                self.how = f"timed runs failed: {outcome.failure}"
                self.runners = {}
        for name, runner in self.runners.items():
            self.rows[name].with_times(runner.medians(self.ranks))
            clock = runner.clock(self.ranks)
            if clock is not None:
                self.rows[name].cycles, self.rows[name].megahertz = clock
            self.rows[name].runs = len(runner.times)

    def _progress(self, runs: Iterable[int]) -> Iterable[int]:
        hidden = self.ranks.rank > 0 or None
        return tqdm(runs, desc=f"{self.case.name} runs", leave=False, disable=hidden)

    def _shares(self) -> None:
        """The ideal, and every row's share of it."""
        whole = [r for r in self.rows.values() if r.whole and r.both is not None]
        if self.long:
            self._from_less()
        elif whole:
            best = min(whole, key=lambda r: r.both or 0.0)
            self.how = f"{best.contestant} over {self.ranks.size}"
            for name in ("forward", "backward", "both", "cycles"):
                found = [getattr(r, name) for r in whole]
                if None not in found:
                    self.ideal[name] = min(found) / self.ranks.size
        for row in self.rows.values():
            row.share(self.ideal)

    def _from_less(self) -> None:
        """The ideal, scaled by FLOP from a case that one GPU computes in time."""
        case = for_one_gpu(self.case, self.args)
        name = heading(case, {}, "")
        if name not in self.baselines:
            singles = [c for c in self.everyone if c.whole]
            smaller = Match(case, singles, baseline_runs(self.args), self.ranks, self.baselines)
            smaller.play()
            self.baselines[name] = smaller.ideal, smaller.how
        ideal, how = self.baselines[name]
        ratio = self.case.flop / case.flop
        self.ideal = {name: best * ratio for name, best in ideal.items()}
        self.how = f"{how}, from {short_title(case)} by FLOP"

    def _new_length(self, c: Contestant) -> None:
        """What a first call with a length not seen before costs this rank's host."""
        case = self._other_length(1)
        if self.long or case is None:
            return
        row, outcome = self.rows[c.name], self.ranks.attempt(partial(self._first_call, c, case))
        if outcome.failure:
            row.note += f" new length failed: {outcome.failure}"
        else:
            row.new_ms = max(self.ranks.gather(outcome.value))

    def _of_length(self, tokens: int) -> Case | None:
        """The same case with about this many tokens; None if that leaves none."""
        tokens -= tokens % self.args.document_multiple
        return self.case.make(tokens) if tokens > 0 and self.case.make else None

    def _other_length(self, n: int) -> Case | None:
        """The same case a little shorter, the n-th such variant; None if it is already short."""
        fewer = self.case.tokens - 128 * self.ranks.size - (n - 1) * self.args.document_multiple
        return None if fewer < self.case.tokens // 4 else self._of_length(fewer)

    def _first_call(self, c: Contestant, case: Case) -> float:
        attention = c.make(case, self.ranks)
        problem = Problem(case, self.ranks, self.dtype, self.args.seed)
        *leaves, dout = problem.shards(c)
        taken = []
        for _ in range(2):
            self.ranks.wait()
            self.ranks.gather("ready")
            began = perf_counter()
            torch.autograd.grad(attention(*leaves), leaves, dout)
            taken.append(1e3 * (perf_counter() - began))
        return taken[0] - taken[1]

    def _account(self, c: Contestant) -> None:
        """What a contestant's plan predicts, and what was measured."""
        row, outcome = self.rows[c.name], self.ranks.attempt(partial(self._accounted, c))
        if outcome.failure:
            row.note += f" no account: {outcome.failure}"
        row.account = outcome.value

    def _accounted(self, c: Contestant) -> Account | None:
        op, ranks = self.attentions[c.name], self.ranks
        if not isinstance(op, Op) or c.kernel.startswith("te_cp"):  # has no plan of ours
            return None
        costs, reduce_dtype = comm_of(op).costs, op.rest.get("reduce_dtype")
        account = Account.of(self.case, op.layout, costs, self.dtype, reduce_dtype)
        account.saw(self.watches[c.name], ranks)
        other = self._other_length(2)
        if other is not None:
            account.time_plan(op, other, c.layout(other, ranks.size), ranks)
        share = self._of_length(self.case.tokens // ranks.size)
        if share is not None and ranks.cuda:
            problem, layout = Problem(share, ranks, self.dtype, self.args.seed), alone(share, 1)
            shards = tuple(t.requires_grad_() for t in problem.whole[:3])
            by_itself = Op(share, layout, None, op.options)
            first = first_run(Runner.of(c.name, by_itself, (*shards, problem.whole[3])), ranks)
            account.alone_bytes = first[1] or None
        return account
