"""Makes the plan's table from the chosen strategies: what each op and each move costs."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from torch.fx import Node

from annotations.registry import as_tuple, record_of

from ..capture.capture import Captured
from ..capture.nodes import module_of, signature, tensor_inputs, values_of
from ..strategies.choices import Choices, OpSite, Reading
from ..strategies.op_seconds import flops
from ..strategies.op_strategies import Strategy
from ..strategies.placements import Placements, local_bytes
from .engine_cost import PlanCost, received_bytes
from .engine_plan import EnginePlan, Held, OpPlacements, Row, placements_text, sync_row, to_plain

Chosen = Mapping[Node, Strategy]


def make_report(
    cost: PlanCost, chosen: Chosen, graph: str, in_order: Mapping[str, Sequence[str]]
) -> EnginePlan:
    """Summarise a plan of the graph with this hash; equal ops and equal moves share a row."""
    choices, summary = cost.choices, _Summary(cost, chosen)
    return EnginePlan(
        parts=prod(choices.parts),
        copies=choices.copies,
        splits={n.name: to_plain(s.split) for n, s in chosen.items() if n.name in summary.ops},
        rows=list(Counter(summary.rows()).items()),
        mesh_shape=choices.parts,
        ops={n.name: OpPlacements.of(s) for n, s in chosen.items() if n.op == "call_function"},
        parameters={
            name: placements_text(placements)
            for name, placements in sharded_parameters(choices, chosen).items()
        },
        held=summary.held(),
        limit_bytes=cost.budget.limit_bytes,
        calibrated=cost.rates.calibrated,
        graph=graph,
        hoisted=bool(in_order),
        in_order=in_order,
    )


def sharded_parameters(choices: Choices, chosen: Chosen) -> dict[str, Placements]:
    """Placements of the parameters that a chosen plan shards, by name."""
    named = choices.parameters.items()
    return {name: chosen[n].outputs[0] for n, name in named if any(chosen[n].divided)}


def graph_hash(captured: Captured) -> str:
    """Hash of the ops, their shapes and how they are wired; a device's index does not change it."""
    digest = hashlib.sha256()
    for node in captured.graph.nodes:
        wired = [x.name for x in tensor_inputs(node)]
        known = repr((node.name, signature(node, tensor_inputs(node)), wired))
        digest.update(re.sub(r"0x[0-9a-f]+|(?<=cuda):\d+|index=\d+", "", known).encode())
    return digest.hexdigest()[:16]


def table_name(node: Node, choices: Choices) -> str:
    """What the table calls an op that it lists, or whose result moves: its function, or the module
    that calls it, with the number of the layer."""
    record = record_of(node.target)
    if record is not None:
        return record.title
    module = module_of(node)
    name = choices.parameters.get(node) or (module if flops(node) else "") or node.name
    if name == node.name and node.op == "call_function" and module:
        name = f"{module} {getattr(node.target, '__name__', name).partition('.')[0]}"
    return name


def in_any_layer(name: str) -> str:
    """A module's path with ``*`` for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=[. ])", "*", name)


class _Summary:
    def __init__(self, cost: PlanCost, chosen: Chosen) -> None:
        self.cost, self.choices, self.chosen = cost, cost.choices, chosen
        self.ops = {op.name: op for op in self.choices.ops}  # the annotated ones
        # For each tensor, the ways in which it is read, and the readers of each way.
        self.readings: dict[tuple[Node, int], dict[Reading, list[Node]]] = {}
        for edge in self.choices.edges:
            strategy = chosen[edge.consumer]
            reading = strategy.inputs[edge.slot], strategy.grads[edge.slot]
            ways = self.readings.setdefault((edge.producer, edge.index), {})
            ways.setdefault(reading, []).append(edge.consumer)

    def rows(self) -> Iterator[Row]:
        """A row for each op and move that matters, in the table's order."""
        calls = [node for node in self.chosen if node.op == "call_function"]
        rest = [node for node in calls if node.name not in self.ops and not flops(node)]
        for node in calls:
            if node.name in self.ops:
                yield self._op_row(node, self.ops[node.name])
            elif flops(node):
                # A product of matrices: the module that calls it, and its tensors' placements.
                placed = OpPlacements.of(self.chosen[node])
                split = f"{' '.join(placed.inputs)} -> {placed.outputs[0]}"
                where = in_any_layer(table_name(node, self.choices))
                yield Row(where, split, "nothing", 0, 0, self._seconds(node))
        if seconds := sum(map(self._seconds, rest)):
            yield Row(f"other ops ({len(rest)})", "-", "nothing", 0, 0, seconds)
        yield from self._move_rows()
        for name, placements in sharded_parameters(self.choices, self.chosen).items():
            yield Row(in_any_layer(name), placements_text(placements), "kept in parts", 0, 0)
        synced = sum(self.cost.sync_bytes(n, self.chosen[n]) for n in self.choices.parameters)
        ranks = prod(self.choices.parts) * self.choices.copies
        yield sync_row(ranks, synced, self.cost.sync_seconds(synced))

    def _seconds(self, node: Node) -> float:
        return self.cost.op_seconds(node, self.chosen[node])

    def _op_row(self, node: Node, op: OpSite) -> Row:
        strategy = self.chosen[node]
        over = zip(strategy.split, self.choices.parts, strict=True)
        split = ", ".join(f"{name} / {n}" for name, n in over if name)
        inner = strategy.inner
        what = ", ".join(dict.fromkeys(each.what for each in inner if each.what)) or "nothing"
        imbalance = prod(each.imbalance for each in inner)
        if imbalance >= 1.005:
            what += f" (imbalance {imbalance:.2f})"
        moved = sum(x.forward_bytes for x in inner), sum(x.backward_bytes for x in inner)
        return Row(op.op, split or "whole", what, *moved, self._seconds(node))

    def _move_rows(self) -> Iterator[Row]:
        for (producer, index), ways in self.readings.items():
            shape, source = values_of(producer)[index].shape, self.chosen[producer].outputs[index]
            for target, grad in ways:
                moved = self.cost.move(producer, index, source, (target, grad))
                if any(moved[:2]):
                    what = f"{_words(source)} -> {_words(target)} of {list(shape)}"
                    if source == target:
                        what = f"gradient of {_words(target)} {list(shape)}"
                    yield Row(in_any_layer(table_name(producer, self.choices)), "-", what, *moved)

    def held(self) -> Held:
        """What a rank must keep."""
        cost, choices, chosen = self.cost, self.choices, self.chosen
        each = [cost.parameter_bytes(node, chosen[node]) for node in choices.kept]
        parameters, gradients, optimizer, casts = map(sum, zip((0,) * 4, *each, strict=True))
        activations = 0
        for (producer, index), ways in self.readings.items():
            source, is_parameter = chosen[producer].outputs[index], producer in choices.parameters
            kept = {
                target
                for (target, _), readers in ways.items()
                if any(map(cost.keeps, readers)) or (is_parameter and target != source)
            }
            if is_parameter:
                kept -= {source}
            value = values_of(producer)[index]
            activations += sum(local_bytes(value, placements, choices.parts) for placements in kept)
        own = [node for node in chosen if node.name in self.ops]
        activations += sum(self._kept_inside(node, self.ops[node.name]) for node in own)
        passing = max(map(received_bytes, chosen.values()), default=0)
        return Held(parameters, gradients, optimizer, activations, passing, casts)

    def _kept_inside(self, node: Node, op: OpSite) -> int:
        """Bytes of results that the annotation leaves open: only the op's backward reads them."""
        record, choices = record_of(node.target), self.choices
        if record is None or not record.saves_results or not choices.differentiated.get(node):
            return 0
        split = zip(self.chosen[node].split, choices.parts, strict=True)
        made = zip(as_tuple(node.meta["val"]), op.bindings[0].output_shapes(), strict=True)
        kept = sum(value.nbytes for value, shape in made if shape is None)
        return kept // prod(n for name, n in split if name)


def _words(placements: Placements) -> str:
    """Placements as text, in words if there is only one axis."""
    text = placements_text(placements)
    if len(placements) > 1:
        return text
    return {"R": "whole", "P": "partial sum"}.get(text) or f"cut on dim {text[1:]}"
