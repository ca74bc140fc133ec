"""From what was chosen to the plan's table: what each op and each move costs."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch.fx import Node

from annotations.registry import record_of

from ..capture.capture import Captured
from ..capture.nodes import signature, tensor_inputs, value_of
from ..plan.engine_cost import (
    Rates,
    all_reduce_bytes,
    compute_seconds,
    flops,
    inner_cost,
    steps_bytes,
    steps_seconds,
)
from ..plan.memory import Budget, Held, held, keeps, passing_bytes
from ..plan.policies import OpSite
from ..plan.repeats import module_of
from ..strategies.choices import Choices, move_steps
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Places, local_bytes
from .engine_plan import (
    EnginePlan,
    OpPlacements,
    Row,
    places_text,
    places_words,
    sync_row,
    to_plain,
)

Chosen = Mapping[Node, Strategy]


def make_report(choices: Choices, chosen: Chosen, rates: Rates, budget: Budget) -> EnginePlan:
    """Summarise a plan; equal ops and equal moves share a row."""
    summary = _Summary(choices, chosen, rates)
    ops = {op.name: op for op in choices.ops}
    return EnginePlan(
        parts=prod(choices.parts),
        copies=choices.copies,
        splits={n.name: to_plain(s.split) for n, s in chosen.items() if n.name in ops},
        rows=list(Counter(summary.rows(ops)).items()),
        mesh_shape=choices.parts,
        ops={n.name: OpPlacements.of(s) for n, s in chosen.items() if n.op == "call_function"},
        parameters={
            choices.parameters[n]: places_text(s.outputs[0])
            for n, s in cut(choices, chosen).items()
        },
        held=summary.held(budget),
        limit_bytes=budget.limit_bytes,
        calibrated=rates.calibrated,
        graph=graph_hash(choices.captured),
    )


def cut(choices: Choices, chosen: Chosen) -> dict[Node, Strategy]:
    """The parameters that are kept in parts."""
    return {n: chosen[n] for n in choices.parameters if any(chosen[n].divided)}


def graph_hash(captured: Captured) -> str:
    """Of the ops, their shapes and how they are wired; the same on every rank's own device."""
    digest = hashlib.sha256()
    for node in captured.graph.nodes:
        wired = [x.name for x in tensor_inputs(node)]
        known = repr((node.name, signature(node, tensor_inputs(node)), wired))
        digest.update(re.sub(r"0x[0-9a-f]+|(?<=cuda):\d+|index=\d+", "", known).encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class _Summary:
    choices: Choices
    chosen: Chosen
    rates: Rates

    def rows(self, ops: Mapping[str, OpSite]) -> Iterator[Row]:
        """One for each op and move that counts, in the table's order.

        Args:
            ops: the annotated ops by name.
        """
        calls = [node for node in self.chosen if node.op == "call_function"]
        for node in calls:
            if node.name in ops:
                yield self._op_row(node, ops[node.name])
            elif flops(node):
                yield self._product_row(node)
        rest = [node for node in calls if node.name not in ops and not flops(node)]
        if seconds := sum(map(self._compute_seconds, rest)):
            yield Row(f"other ops ({len(rest)})", "-", "nothing", 0, 0, seconds)
        yield from self._move_rows()
        for node, strategy in cut(self.choices, self.chosen).items():
            name = re.sub(r"(?<=\.)\d+(?=\.)", "*", self.choices.parameters[node])
            yield Row(name, places_text(strategy.outputs[0]), "kept in parts", 0, 0)
        yield self._sync_row()

    def _compute_seconds(self, node: Node) -> float:
        parts, differentiated = self.choices.parts, self.choices.differentiated[node]
        return compute_seconds(node, self.chosen[node], parts, self.rates, differentiated)

    def _op_row(self, node: Node, op: OpSite) -> Row:
        strategy = self.chosen[node]
        split = ", ".join(
            f"{name} / {n}"
            for name, n in zip(strategy.split, self.choices.parts, strict=True)
            if name
        )
        inner = inner_cost(strategy)
        what = inner.what or "nothing"
        if inner.imbalance >= 1.005:
            what += f" (imbalance {inner.imbalance:.2f})"
        moved = inner.forward_bytes, inner.backward_bytes
        return Row(op.op, split or "whole", what, *moved, self._compute_seconds(node))

    def _product_row(self, node: Node) -> Row:
        """A product of matrices: the module that calls it, and the placements of its tensors."""
        where = re.sub(r"(?<=\.)\d+(?=\.)", "*", module_of(node) or node.name)
        placed = OpPlacements.of(self.chosen[node])
        split = f"{' '.join(placed.inputs)} -> {placed.outputs[0]}"
        return Row(where, split, "nothing", 0, 0, self._compute_seconds(node))

    def _readings(self) -> dict[tuple[Node, int], dict[tuple[Places, Places], list[Node]]]:
        """Of each tensor the ways in which it is read, and who reads it so."""
        found: dict[tuple[Node, int], dict[tuple[Places, Places], list[Node]]] = {}
        for edge in self.choices.edges:
            strategy = self.chosen[edge.consumer]
            reading = strategy.inputs[edge.slot], strategy.grads[edge.slot]
            ways = found.setdefault((edge.producer, edge.index), {})
            ways.setdefault(reading, []).append(edge.consumer)
        return found

    def _move_rows(self) -> Iterator[Row]:
        for (producer, index), ways in self._readings().items():
            value, source = value_of(producer, index), self.chosen[producer].outputs[index]
            for target, grad in ways:
                paths = move_steps(self.choices, producer, value, source, (target, grad))
                forward, backward = (steps_bytes(path, value) for path in paths)
                if not forward and not backward:
                    continue
                seconds = sum(steps_seconds(path, value, self.rates) for path in paths)
                what = f"{places_words(source)} -> {places_words(target)} of {list(value.shape)}"
                if source == target:
                    what = f"gradient of {places_words(target)} {list(value.shape)}"
                yield Row(self._name(producer), "-", what, forward, backward, seconds)

    def _name(self, node: Node) -> str:
        """What a row calls the op that made a tensor, the same in every layer."""
        record = record_of(node.target)
        if record is not None:
            return record.title
        module = module_of(node)
        name = self.choices.parameters.get(node) or (module if flops(node) else "") or node.name
        if name == node.name and node.op == "call_function" and module:
            name = f"{module} {getattr(node.target, '__name__', name).partition('.')[0]}"
        return re.sub(r"(?<=\.)\d+(?=[. ])", "*", name)

    def _sync_row(self) -> Row:
        """What ``sync_grad`` adds up: whole parameters over all ranks, others over the copies."""
        choices = self.choices
        ranks, count = prod(choices.parts) * choices.copies, 0
        for node in choices.parameters:
            if choices.differentiated[node]:
                strategy = self.chosen[node]
                kept = local_bytes(choices.stored[node], strategy.outputs[0], choices.parts)
                count += all_reduce_bytes(kept, choices.copies if any(strategy.divided) else ranks)
        return sync_row(ranks, count, count / self.rates.link(-1).bytes_per_second)

    def held(self, budget: Budget) -> Held:
        """What a rank must keep."""
        choices, chosen = self.choices, self.chosen
        stored = [(kept, n.meta["val"], chosen[n].outputs[0]) for n, kept in choices.stored.items()]
        activations: list[tuple[Any, Places]] = []
        for (producer, index), ways in self._readings().items():
            source, is_parameter = chosen[producer].outputs[index], producer in choices.parameters
            places = {
                target
                for (target, _), readers in ways.items()
                if any(keeps(reader, choices.differentiated) for reader in readers)
                or (is_parameter and target != source)
            }
            if is_parameter:
                places -= {source}
            activations += [(value_of(producer, index), target) for target in places]
        passing = max((passing_bytes(s) for s in chosen.values()), default=0)
        return held(stored, activations, passing, choices.parts, budget)
