"""What a captured graph may not have: the module is refused; the error says what to do instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from annotations.registry import record_of

from . import dropout
from .call_inputs import CaptureError


@contextlib.contextmanager
def no_values() -> Iterator[None]:
    """Turn torch's long error about a value that a graph does not have into one sentence.

    Raises:
        CaptureError: the module asks a tensor for its value.
    """
    try:
        yield
    except GuardOnDataDependentSymNode as error:
        lines = str(error).splitlines()
        where = [line.removeprefix("Caused by: ") for line in lines if "Caused by: " in line]
        raise CaptureError(
            "the module decides by a tensor's value, as of .item(), which a graph does not know: "
            + " ".join([lines[0], *where[:1]])
        ) from None


def refuse_unsupported(exported: torch.export.ExportedProgram) -> None:
    """Refuse changed buffers, nested graphs, and random numbers that are left after dropout was
    replaced (:func:`.dropout.dropped_by_place`).

    Raises:
        CaptureError: it has one.
    """
    for spec in exported.graph_signature.output_specs:
        if spec.kind != OutputKind.USER_OUTPUT:
            raise CaptureError(
                f"the module changes {spec.target!r} in its forward; that is not supported yet"
            )
    for node in exported.graph_module.graph.nodes:
        if node.op == "get_attr" or isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureError(f"{node.name}: nested graphs ({node.target}) are not supported yet")
        if dropout.draws(node):
            raise CaptureError(
                f"{node.name}: {node.target} draws random numbers, which is not supported yet: "
                "ranks would draw the same ones for different tokens" + _instead(node)
            )


def refuse_gradients_off(exported: torch.export.ExportedProgram) -> None:
    """Refuse no_grad where it would matter: the graph is differentiated as if it were not there.

    Raises:
        CaptureError: parameters or inputs flow through it.
    """
    flowing: set[Node] = set()
    inputs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    for node in exported.graph_module.graph.nodes:
        if node.op == "placeholder":
            kind = inputs[node.name].kind
            value = node.meta.get("val")
            floating = isinstance(value, Tensor) and value.is_floating_point()
            trained = kind == InputKind.PARAMETER and value.requires_grad
            if trained or (floating and kind == InputKind.USER_INPUT):
                flowing.add(node)
            continue
        comes = [source for source in node.all_input_nodes if source in flowing]
        value = node.meta.get("val")
        whole_numbers = isinstance(value, Tensor) and not value.is_floating_point()
        if not comes or whole_numbers or node.target is torch.ops.aten.detach.default:
            continue
        flowing.add(node)
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
            names = ", ".join(source.name for source in comes)
            raise CaptureError(
                f"the forward switches gradients off for what depends on {names} (torch.no_grad, "
                "an autograd.Function, or checkpoint with use_reentrant=True), which is not "
                "supported: use tensor.detach(), register_op, or use_reentrant=False"
            )


def refuse_sizes_by_values(graph: Graph, splits: Mapping[str, Any]) -> None:
    """Refuse, in a graph that is compiled, cut ops whose results' sizes depend on values.

    Args:
        splits: op name to what it is cut on, on a mesh of several axes a tuple of that.
    Raises:
        CaptureError: it has one.
    """
    for node in graph.nodes:
        record, split = record_of(node.target), splits.get(node.name)
        cuts = split if isinstance(split, tuple) else (split,)
        if record is None or not record.rule.orders.keys() & set(cuts):
            continue
        if record.rule.varies(record.arguments(node.args, node.kwargs)):
            raise CaptureError(
                f"parallelize: compile=True, but sizes inside {record.title} depend on the "
                "documents of a batch where tokens are in an order by documents; expected: "
                "compile=False; or natural order: pas_config={'hoist': False}, and a model that "
                "does not shuffle tokens itself"
            )


def _instead(node: Node) -> str:
    if "scaled_dot_product" in str(node.target):
        return (
            "; set its dropout_p to 0, or call wrap_ring_attn_func, which may be cut on the "
            "sequence (a model of transformers: attn_implementation='seqshard')"
        )
    return "; use torch.nn.Dropout, which draws by token, or call .eval() first"
