"""What a plan says about an order of tokens: what was permuted, or why nothing was. If some ops
gain from the order and others lose, it also says how long each way to run them would take."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from torch.fx import Node

from annotations.registry import record_of
from annotations.rules import LateOrder, Order

from .permutation_choice import PermutationChoice, TensorPermutation


def notes_of(choice: PermutationChoice, wanting: Container[Node]) -> list[str]:
    """The lines for a plan. ``wanting`` are the ops that want another order than the sequence's."""
    said = _done(choice) if choice.done else _declined(choice, wanting)
    layout = f"layout: {_word(choice.order)} over {choice.order.length} tokens{said}"
    return [layout, *_prices(choice, wanting)]


def sides_of(
    choice: PermutationChoice, wanting: Container[Node], others: bool | None = None
) -> dict[Node, bool]:
    """Whether ops run in the new order: those in ``wanting`` do; the others do if ``others`` is
    True and do not if it is False. If it is None they are left out, free to run where it is
    cheaper."""
    return {
        node: side
        for node in choice.gains
        if (side := True if node in wanting else others) is not None
    }


def _done(choice: PermutationChoice) -> str:
    back = [move for move in choice.made if move.back]
    text = f", permuted once at: {_names([move for move in choice.made if not move.back])}"
    return text + (f"; natural order again at: {_names(back)}" if back else "")


def _declined(choice: PermutationChoice, wanting: Container[Node]) -> str:
    """Why nothing was permuted: what it would take to run all attention in the order."""
    forced = replace(choice, forced=sides_of(choice, wanting))
    gain = sum(gain for node, gain in forced.gains.items() if node in wanting)
    if gain <= 0:
        return " would not make attention faster; kept natural order"
    titles = _titles(node for node in _others(forced, wanting) if forced.sides[node])
    longer = f" and {titles} in that order" if titles else ""
    return (
        f" would spare {gain * 1e3:.3g} ms a step in attention, but permuting "
        f"{_names(forced.made)}{longer} would take {(forced.seconds + gain) * 1e3:.3g} ms; kept "
        "natural order"
    )


def _prices(choice: PermutationChoice, wanting: Container[Node]) -> list[str]:
    """For a graph in which some ops gain from the order and others, such as recurrent layers, lose:
    a line that compares a step in which all run in one order with one in which each kind has its
    own."""
    others = _others(choice, wanting)
    if not others:
        return []
    one, two = (replace(choice, forced=sides_of(choice, wanting, x)) for x in (True, False))
    natural = [node for node in others if not choice.sides[node]]
    word, titles = _word(choice.order), _titles(others)
    return [
        f"layers: natural order for all +0 ms, {word} for all {_signed(one)}, natural for {titles} "
        f"alone {_signed(two)}; chosen: {len(natural)} of {len(others)} of these calls in natural "
        f"order, {_signed(choice)}"
    ]


def _others(choice: PermutationChoice, wanting: Container[Node]) -> list[Node]:
    """The ops that take longer in the order."""
    return [node for node, gain in choice.gains.items() if gain < 0 and node not in wanting]


def _titles(nodes: Iterable[Node]) -> str:
    records = (record_of(node.target) for node in nodes)
    return " and ".join(dict.fromkeys(record.title for record in records if record is not None))


def _signed(choice: PermutationChoice) -> str:
    return f"{choice.seconds * 1e3:+.3g} ms"


def _word(order: Order | LateOrder) -> str:
    """The name of an order, without the number of its parts."""
    return order.name.partition(":")[0]


def _names(moves: Sequence[TensorPermutation]) -> str:
    return ", ".join(dict.fromkeys(_named(move.value) for move in moves)) or "nothing"


def _named(value: Node) -> str:
    """A value's name, and where it is: what it is made from, or the module that makes it."""
    stack = list(value.meta.get("nn_module_stack", {}).values())
    inside = stack[-1][0].removeprefix("L['self']").lstrip(".") if stack else ""
    if value.op == "placeholder":
        return value.name
    made_from = [x.name for x in value.all_input_nodes if x.op == "placeholder"]
    where = f"in {inside}" if inside else f"from {', '.join(made_from)}" if made_from else ""
    return f"{value.name} ({where})" if where else value.name
