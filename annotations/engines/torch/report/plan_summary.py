"""From what was chosen to the plan's table: what each op and each move costs."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

from torch.fx import Node

from annotations.registry import record_of

from ..capture.capture import Captured, tensor_inputs
from ..capture.nodes import signature, value_of
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
from .engine_plan import EnginePlan, Lying, Row, places_text, places_words, sync_row, to_plain

Chosen = Mapping[Node, Strategy]


def make_report(choices: Choices, chosen: Chosen, rates: Rates, budget: Budget) -> EnginePlan:
    """Summarise a plan; equal ops and equal moves share a row."""
    by_name = {op.name: op for op in choices.ops}
    rows: Counter[Row] = Counter()
    for node, strategy in chosen.items():
        if node.name in by_name:
            rows[_op_row(node, by_name[node.name], strategy, choices, rates)] += 1
        elif node.op == "call_function" and flops(node):
            rows[_product_row(node, strategy, choices, rates)] += 1
    rest = _rest_row(chosen, by_name, choices, rates)
    if rest.seconds:
        rows[rest] += 1
    rows += _move_rows(choices, chosen, rates)
    rows += _parameter_rows(choices, chosen)
    rows[_sync(choices, chosen, rates)] += 1
    return EnginePlan(
        prod(choices.parts),
        choices.copies,
        {op.name: to_plain(chosen[n].split) for n in chosen if (op := by_name.get(n.name))},
        list(rows.items()),
        choices.parts,
        {n.name: _lying(s) for n, s in chosen.items() if n.op == "call_function"},
        {choices.parameters[n]: places_text(s.outputs[0]) for n, s in cut(choices, chosen).items()},
        _held(choices, chosen, budget),
        budget.limit_bytes,
        rates.calibrated,
        graph_hash(choices.captured),
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


def _lying(strategy: Strategy) -> Lying:
    return Lying(
        strategy.split,
        tuple(map(places_text, strategy.inputs)),
        tuple(map(places_text, strategy.outputs)),
    )


def _op_row(node: Node, op: OpSite, strategy: Strategy, choices: Choices, rates: Rates) -> Row:
    split = ", ".join(
        f"{name} / {n}" for name, n in zip(strategy.split, choices.parts, strict=True) if name
    )
    inner = inner_cost(strategy)
    what = inner.what or "nothing"
    if inner.imbalance >= 1.005:
        what += f" (imbalance {inner.imbalance:.2f})"
    seconds = compute_seconds(node, strategy, choices.parts, rates, choices.differentiated[node])
    return Row(op.op, split or "whole", what, inner.forward_bytes, inner.backward_bytes, seconds)


def _product_row(node: Node, strategy: Strategy, choices: Choices, rates: Rates) -> Row:
    """A product of matrices: where it stands, and how its tensors lie."""
    where = re.sub(r"(?<=\.)\d+(?=\.)", "*", module_of(node) or node.name)
    inputs = " ".join(map(places_text, strategy.inputs))
    seconds = compute_seconds(node, strategy, choices.parts, rates, choices.differentiated[node])
    return Row(where, f"{inputs} -> {places_text(strategy.outputs[0])}", "nothing", 0, 0, seconds)


def _rest_row(chosen: Chosen, by_name: Mapping[str, Any], choices: Choices, rates: Rates) -> Row:
    rest = {
        n: s for n, s in chosen.items()
        if n.op == "call_function" and n.name not in by_name and not flops(n)
    }  # fmt: skip
    seconds = sum(
        compute_seconds(n, s, choices.parts, rates, choices.differentiated[n])
        for n, s in rest.items()
    )
    return Row(f"other ops ({len(rest)})", "-", "nothing", 0, 0, seconds)


def _readings(choices: Choices, chosen: Chosen) -> dict[tuple[Node, int], dict[Any, list[Node]]]:
    """Of each tensor the ways in which it is read, and who reads it so."""
    found: dict[tuple[Node, int], dict[Any, list[Node]]] = {}
    for edge in choices.edges:
        strategy = chosen[edge.consumer]
        reading = strategy.inputs[edge.slot], strategy.grads[edge.slot]
        ways = found.setdefault((edge.producer, edge.index), {})
        ways.setdefault(reading, []).append(edge.consumer)
    return found


def _move_rows(choices: Choices, chosen: Chosen, rates: Rates) -> Counter[Row]:
    rows: Counter[Row] = Counter()
    for (producer, index), ways in _readings(choices, chosen).items():
        value, source = value_of(producer, index), chosen[producer].outputs[index]
        for target, grad in ways:
            there, back = move_steps(choices, producer, value, source, (target, grad))
            forward, backward = steps_bytes(there, value), steps_bytes(back, value)
            if not forward and not backward:
                continue
            seconds = steps_seconds(there, value, rates) + steps_seconds(back, value, rates)
            what = f"{places_words(source)} -> {places_words(target)} of {list(value.shape)}"
            if source == target:
                what = f"gradient of {places_words(target)} {list(value.shape)}"
            rows[Row(_name(producer, choices), "-", what, forward, backward, seconds)] += 1
    return rows


def _name(node: Node, choices: Choices) -> str:
    """What a row calls the op that made a tensor; alike ops in several layers alike."""
    record = record_of(node.target)
    if record is not None:
        return record.title
    name = choices.parameters.get(node) or (module_of(node) if flops(node) else "") or node.name
    if name == node.name and node.op == "call_function" and module_of(node):
        name = f"{module_of(node)} {getattr(node.target, '__name__', name).partition('.')[0]}"
    return re.sub(r"(?<=\.)\d+(?=[. ])", "*", name)


def _parameter_rows(choices: Choices, chosen: Chosen) -> Counter[Row]:
    rows: Counter[Row] = Counter()
    for node, strategy in cut(choices, chosen).items():
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", choices.parameters[node])
        rows[Row(name, places_text(strategy.outputs[0]), "kept in parts", 0, 0)] += 1
    return rows


def _sync(choices: Choices, chosen: Chosen, rates: Rates) -> Row:
    """What ``sync_grad`` adds up: whole parameters over all ranks, others over the copies."""
    ranks, count = prod(choices.parts) * choices.copies, 0
    for node in choices.parameters:
        if choices.differentiated[node]:
            kept = local_bytes(choices.stored[node], chosen[node].outputs[0], choices.parts)
            over = choices.copies if any(chosen[node].divided) else ranks
            count += all_reduce_bytes(kept, over)
    return sync_row(ranks, count, count / rates.link(-1).bytes_per_second)


def _held(choices: Choices, chosen: Chosen, budget: Budget) -> Held:
    stored = [(kept, n.meta["val"], chosen[n].outputs[0]) for n, kept in choices.stored.items()]
    activations: list[tuple[Any, Places]] = []
    for (producer, index), ways in _readings(choices, chosen).items():
        source = chosen[producer].outputs[index]
        places = {
            target
            for (target, _), readers in ways.items()
            if any(keeps(reader, choices.differentiated) for reader in readers)
            or (producer in choices.parameters and target != source)
        }
        if producer in choices.parameters:
            places -= {source}
        activations += [(value_of(producer, index), target) for target in places]
    passing = max((passing_bytes(s) for s in chosen.values()), default=0)
    return held(stored, activations, passing, choices.parts, budget)
