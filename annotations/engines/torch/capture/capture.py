"""From a module to a graph of ops: ``torch.export``, made functional, cross entropy made exact.

nn.Module + dummy arguments --capture--> Captured: graph, what its inputs are, how outputs nest
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from annotations.registry import record_of

from . import checkpointed, composites, dropout
from .call_inputs import CallInputs, CaptureError, Dims, by_name, left_open, repeatable_inputs
from .losses import exact_cross_entropy
from .nodes import values_of
from .unsupported import no_values, refuse_gradients_off, refuse_unsupported


@dataclass(frozen=True, eq=False)
class Captured:
    """A module's forward as a functional graph.

    Attributes:
        graph: placeholders are parameters, buffers, constants, then the user's flat inputs.
        attributes: placeholder name to the module's parameter or buffer name.
        constants: placeholder name to the tensor it stands for.
        user_inputs: for each of the user's flat inputs its placeholder's name, or None if it is not
            a tensor; the seed's comes last, if the graph draws.
        inputs: what the user's inputs must be like.
        draws: whether the graph takes a seed of :func:`.dropout.draw_seed` as its last input.
        out_spec: how results nest.
    """

    graph: Graph
    attributes: Mapping[str, str]
    constants: Mapping[str, Tensor]
    user_inputs: Sequence[str | None]
    inputs: CallInputs
    out_spec: pytree.TreeSpec
    draws: bool


def bound_arguments(
    module: torch.nn.Module, examples: Mapping[str, Any], called: str = "dummy_forward_args"
) -> inspect.BoundArguments:
    """Example arguments as the module's ``forward`` takes them.

    Args:
        called: what the user calls them.
    Raises:
        CaptureError: ``forward`` does not take them, or does not say what it takes.
    """
    try:
        return inspect.signature(module.forward).bind(**examples)
    except (TypeError, ValueError) as error:
        raise CaptureError(
            f"{called} do not fit {type(module).__name__}.forward: {error}"
        ) from None


def capture(
    module: torch.nn.Module,
    dummy_forward_args: Mapping[str, Any],
    mode: FakeTensorMode | None = None,
) -> Captured:
    """Trace ``module`` in its present mode (train or eval).

    Args:
        dummy_forward_args: example arguments of ``forward`` by name; shapes and dtypes are kept,
            values are not.
        mode: if ``module`` has no data, the mode of its fake tensors.
    Raises:
        CaptureError: the arguments do not fit ``forward``, or the module changes a buffer, draws
            random numbers or nests graphs.
    """
    bound = bound_arguments(module, dummy_forward_args)
    given = by_name(bound)
    exported = _exported(module, given, mode)
    calls = _calls(exported)
    captured = _captured(module, bound.signature, given, exported)
    inputs = captured.inputs
    if not inputs.repeatable:
        return captured
    # The number of documents may also be a constant of the graph: exporting one more shows it.
    longer = _exported(module, inputs.one_longer(), mode)
    if _calls(longer) == calls and _equal_constants(longer, exported):
        return captured
    return replace(captured, inputs=replace(inputs, repeatable=frozenset()))


def capture_open(
    module: torch.nn.Module, example: Mapping[str, Any], dims: Dims, multiple: int = 1
) -> Captured:
    """:func:`capture` with sizes of inputs left open (:mod:`.open_sizes`).

    Args:
        dims: which sizes. multiple: those that the example has as multiples of it
            (:func:`.call_inputs.is_multiple`) stay multiples; the others may be any.
    Raises:
        CaptureError: as for :func:`capture`. UserError: from torch.export, if it needs a size.
    """
    bound = bound_arguments(module, example)
    given = by_name(bound)
    exported = _exported(module, given, None, left_open(given, dims, multiple))
    return _captured(module, bound.signature, given, exported, dims)


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    with warnings.catch_warnings(), checkpointed.marked(), no_values():
        # torch.export's own use of a name that torch deprecates.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        yield


def _exported(
    module: torch.nn.Module,
    arguments: dict[str, Any],
    mode: FakeTensorMode | None,
    sizes: Any = None,
) -> torch.export.ExportedProgram:
    """The module as torch.export traces it, in torch's own ops of all kinds."""
    given = _apart(arguments) if mode is None else _without_data(mode, arguments)
    with _tracing(), _named_keywords(module, arguments):
        exported = torch.export.export(module, (), given, strict=False, dynamic_shapes=sizes)
    refuse_gradients_off(exported)
    return exported


@contextlib.contextmanager
def _named_keywords(module: torch.nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Inside this context ``forward`` has a parameter for each argument that its ``**kwargs`` take:
    torch.export (2.13) does not leave sizes of others open."""
    forward, signature = module.forward, inspect.signature(module.forward)
    fixed = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(fixed) == len(signature.parameters):
        yield
        return

    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    more = set(names) - {p.name for p in fixed}
    keywords = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names if n in more]
    named.__signature__ = signature.replace(parameters=[*fixed, *keywords])  # type: ignore[attr-defined]
    with mock.patch.object(module, "forward", named):
        yield


def _captured(
    module: torch.nn.Module,
    signature: inspect.Signature,
    arguments: dict[str, Any],
    exported: torch.export.ExportedProgram,
    dims: Dims = frozenset(),
) -> Captured:
    with _tracing(), composites.kept_of(exported):
        exported = exported.run_decompositions({})
    graph = exported.graph_module.graph
    seed = dropout.dropped_by_place(graph)
    refuse_unsupported(exported)
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.aten._assert_tensor_metadata.default
    ):
        graph.erase_node(node)
    exact_cross_entropy(graph)
    graph.eliminate_dead_code()
    _join_equal_integers(graph)
    graph.lint()
    out_spec = exported.call_spec.out_spec
    assert out_spec is not None
    examples, spec = pytree.tree_flatten(arguments)
    attributes, constants, user_inputs = _placeholders(exported, examples)
    _join_tied(graph, attributes, module)
    if seed is not None:
        user_inputs.append(seed.name)
    return Captured(
        graph,
        attributes,
        constants,
        user_inputs,
        CallInputs(signature, spec, examples, repeatable_inputs(graph, user_inputs), dims),
        out_spec,
        draws=seed is not None,
    )


def _join_equal_integers(graph: Graph) -> None:
    """Keep one node for integers that every layer computes anew, such as lengths or positions. So
    attention knows that its lengths are those of the layer before, and reads them once."""
    first: dict[str, Node] = {}
    for node in list(graph.nodes):
        made = values_of(node)
        if node.op != "call_function" or not all(isinstance(x, Tensor) for x in made):
            continue
        if any(x.is_floating_point() or x.is_complex() for x in made) or record_of(node.target):
            continue
        same = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _calls(exported: torch.export.ExportedProgram) -> list[str]:
    """The ops and their arguments, but no shapes; also of nested graphs, such as a block under
    autocast."""
    parts = exported.graph_module.modules()
    nodes = [node for part in parts if isinstance(part, GraphModule) for node in part.graph.nodes]
    return [f"{node.name} {node.target} {node.args} {node.kwargs}" for node in nodes]


def _equal_constants(a: torch.export.ExportedProgram, b: torch.export.ExportedProgram) -> bool:
    """Whether tensors that the module makes from numbers are the same."""
    if a.constants.keys() != b.constants.keys():
        return False
    pairs = [(a.constants[name], b.constants[name]) for name in a.constants]
    return all(x is y or (isinstance(x, Tensor) and torch.equal(x, y)) for x, y in pairs)


def _apart(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with a tensor of its own for each: torch.export would take one that is given
    twice for one input."""
    flat, spec = pytree.tree_flatten(arguments)
    seen: set[int] = set()
    for n, value in enumerate(flat):
        if isinstance(value, Tensor) and id(value) in seen:
            flat[n] = value.detach().clone().requires_grad_(value.requires_grad)
        seen.add(id(value))
    return pytree.tree_unflatten(flat, spec)


def _without_data(mode: FakeTensorMode, arguments: dict[str, Any]) -> dict[str, Any]:
    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.device.type == "meta":
            with mode:
                return torch.empty(value.shape, dtype=value.dtype)
        return mode.from_tensor(value)

    return pytree.tree_map(fake, arguments)


def _placeholders(
    exported: torch.export.ExportedProgram, examples: Sequence[Any]
) -> tuple[dict[str, str], dict[str, Tensor], list[str | None]]:
    """What the graph's inputs are: Captured's attributes, constants and user_inputs."""
    attributes: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    user_inputs: list[str | None] = []
    for spec in exported.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            assert spec.target is not None
            attributes[name] = spec.target
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            assert spec.target is not None
            constants[name] = exported.constants[spec.target]
        else:
            is_tensor = isinstance(examples[len(user_inputs)], Tensor)
            user_inputs.append(name if is_tensor else None)
    return attributes, constants, user_inputs


def _join_tied(graph: Graph, attributes: dict[str, str], module: torch.nn.Module) -> None:
    """Keep one placeholder for a tensor that the module has under several names."""
    tensors: dict[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    first: dict[int, Node] = {}
    for node in list(graph.nodes):
        if node.name not in attributes:
            continue
        same = first.setdefault(id(tensors[attributes[node.name]]), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            del attributes[node.name]
