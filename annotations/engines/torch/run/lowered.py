"""A planned graph on plain tensors: all that DTensor decides is decided once, while tracing.

Program (on DTensors) --trace--> joint graph of this rank --partition--> forward, backward

The program runs once on tensors without data. What its DTensors do to this rank's tensors is
recorded: torch's own ops, functional collectives and the annotated ops, with groups and layouts
filled in. AOTAutograd traces, and gives autograd one node for the whole backward, which puts
gradients into ``.grad`` when it is done. The backward's graph reports each gradient earlier.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._functorch._aot_autograd import graph_capture_wrappers as wrappers
from torch._functorch.aot_autograd import aot_module_simplified
from torch.distributed.tensor import DTensor, _collective_utils
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _BoxedCodeGen
from torch.nn import Parameter

from annotations.library.cached_calls import cached
from annotations.progress import stage

from ..capture.capture import Captured
from ..capture.checkpointed import region_of
from ..capture.nodes import example_shape
from ..capture.open_sizes import Conditions, NotOpen, conditions_of
from ..capture.replaced_parameters import as_parameter
from .execute import Program
from .local_graph import output_of, overlap, simplify
from .recompute import save_all, save_regions

Arrived = Callable[[str, Tensor], None]


class LoweringError(RuntimeError):
    """A planned graph could not be traced on plain tensors."""


class OtherSizes(Exception):
    """A graph with open sizes is not for the given ones, as its tracing has shown; ``never`` says
    why it is for none."""

    def __init__(self, never: str = "") -> None:
        super().__init__(never)
        self.never = never


# Gathers from all ranks what sizes their traces are for, or why there is no trace.
Agree = Callable[[Conditions | str], Sequence[Conditions | str]]


class Lowered:
    """A program that is traced at its first call, and once more for each other kind of call:
    gradients on or off, another choice of what needs one, other dtypes or strides, autocast.

    Called like :class:`~.execute.Program`, with the same results and gradients; but if the loss
    uses some of the results, parameters that only the others depend on get gradients of zeros, not
    None. If compiled, torch may refuse to run a backward twice, as under ``torch.compile``.

    Args:
        compiled: have inductor compile the local graphs, which may then compute cheap values again
            in the backward rather than save them; never ops that communicate.
        arrived: called in the backward, unless ``compiled``, with the name of each parameter that
            is a plain tensor and its gradient, which is not in ``.grad`` yet.
        agree: called once for each trace of a graph with open sizes, on all ranks.
    """

    def __init__(
        self,
        program: Program,
        *,
        compiled: bool = False,
        arrived: Arrived | None = None,
        agree: Agree | None = None,
    ) -> None:
        self.captured = program.captured
        self.program, self._compiled = program, compiled
        self._arrived = None if compiled else arrived
        self._traces: dict[Any, Trace] = {}
        self._agree, self._conditions = agree, list[Conditions]()
        self._satisfied: dict[Any, bool] = {}
        if agree is not None:
            self._conditions.append(conditions_of(self.captured))

    def takes(self, flat_inputs: Sequence[Any]) -> bool:
        """Whether inputs that fit the graph have sizes that it is for; all ranks find the same."""
        inputs = self.captured.inputs
        sizes = tuple(flat_inputs[n].shape[dim] for n, dim in sorted(inputs.open))
        satisfied = lambda: all(each.satisfied(flat_inputs) for each in self._conditions)  # noqa: E731
        return cached(self._satisfied, sizes, satisfied)

    def __call__(self, attribute: Callable[[str], Tensor], flat_inputs: list[Any]) -> list[Any]:
        """Run the forward, like :meth:`.execute.Program.__call__`.

        Raises:
            LoweringError: the program cannot be traced.
            OtherSizes: a graph with open sizes cannot be traced, or is not for these sizes.
        """
        given = self.program.given(attribute, flat_inputs)
        kind = self._kind(given)
        if kind not in self._traces:
            with stage("compiling" if self._compiled else "lowering"):
                self._traces[kind] = self._traced(given)
            if not self.takes(flat_inputs):
                raise OtherSizes
        return self._traces[kind](list(given.values()))

    def _traced(self, given: dict[str, Tensor]) -> Trace:
        if self._agree is None:
            return Trace(self.program, given, self._compiled, self._arrived)
        trace, found = None, list[Conditions | str]()
        try:
            trace = Trace(self.program, given, self._compiled, self._arrived)
            found += self._agree(conditions_of(self.captured))
        except (LoweringError, NotOpen) as error:
            found += self._agree(str(error))
        if reasons := [each for each in found if isinstance(each, str)]:
            raise OtherSizes(reasons[0])
        self._conditions += [each for each in found if isinstance(each, Conditions)]
        self._satisfied.clear()
        assert trace is not None
        return trace

    def _kind(self, given: Mapping[str, Tensor]) -> Any:
        """What a trace depends on, beyond what the capture has fixed."""
        device = next((t.device.type for t in given.values()), "cpu")
        open_ = {self.captured.user_inputs[n] for n in self.captured.inputs.open_inputs}
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
            *[
                (t.requires_grad, t.dtype, None if name in open_ else t.stride())
                for name, t in given.items()
            ],
        )

    @property
    def traces(self) -> Sequence[Trace]:
        """The traces made so far."""
        return list(self._traces.values())


_TENSOR = object()


class Trace:
    """The trace of one kind of call of a program. ``graphs`` holds the graph of the forward and, if
    there is one, of the backward, on this rank's tensors."""

    def __init__(
        self, program: Program, given: dict[str, Tensor], compiled: bool, arrived: Arrived | None
    ) -> None:
        self.graphs: list[Graph] = []
        self._program, self._compiled = program, compiled
        self._is_parameter = {name: isinstance(x, Parameter) for name, x in given.items()}
        names = program.captured.attributes
        # For each given value, the parameter's name if its gradient is reported.
        self._reported = [
            names.get(name) if self._is_parameter[name] and not isinstance(x, DTensor) else None
            for name, x in given.items()
        ]
        self._results: list[Any] = []  # flat, with _TENSOR for each tensor
        traced: Any = torch.nn.Module()  # as AOTAutograd wants it
        traced.forward = self._run
        checkpoints = any(region_of(node) is not None for node in program.captured.graph.nodes)
        options: dict[str, Any] = {
            "fw_compiler": self._code,
            "bw_compiler": partial(self._code, arrived=arrived),
            "partition_fn": save_regions if checkpoints else save_all,
        }

        def trace() -> Any:
            with ExitStack() as stack:
                stack.enter_context(torch.fx.traceback.preserve_node_meta())
                if compiled:
                    options.update(_for_inductor(stack))
                else:  # what is saved for the backward may be read by another one
                    stack.enter_context(torch._functorch.config.patch(donated_buffer=False))
                examples = _examples(program.captured, given, stack)
                return aot_module_simplified(traced, examples, **options)

        try:
            try:
                self._local = trace()
            except RecursionError:  # torch works sizes out late, and took max(s, 1) for its own s
                with mock.patch.object(wrappers, "maybe_enable_thunkify", nullcontext):
                    self._local = trace()
        except (ValueError, NotImplementedError):  # about the model, and clear already
            raise
        except Exception as error:
            raise LoweringError(
                "parallelize: the planned graph could not be lowered to plain tensors "
                f"({type(error).__name__}: {error}); with lowered=False it runs on DTensors"
            ) from error

    def __call__(self, tensors: list[Tensor]) -> list[Any]:
        """The flat results of the forward."""
        results = iter(self._local(*tensors))
        return [next(results) if x is _TENSOR else x for x in self._results]

    def _run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What is traced: the program, on tensors in place of those given."""
        given = dict(zip(self._is_parameter, tensors, strict=True))
        for name, tensor in given.items():
            if self._is_parameter[name]:
                as_parameter(tensor)
        results = self._program.run(given, traced=True)
        self._results = [_TENSOR if isinstance(x, Tensor) else x for x in results]
        return tuple(x for x in results if isinstance(x, Tensor))

    def _code(
        self, module: GraphModule, inputs: Sequence[Any], arrived: Arrived | None = None
    ) -> Any:
        """A function that runs a graph. It takes a list of inputs, and empties it."""
        graph = module.graph
        simplify(graph)
        overlap(graph)
        if arrived is not None:
            self._report_gradients(graph, arrived)
        self.graphs.append(graph)
        if self._compiled:
            from torch._inductor.compile_fx import compile_fx_inner

            module.recompile()
            output: Any = output_of(graph)
            tensors = [n for n, x in enumerate(output.args[0]) if isinstance(x, Node)]
            output.meta["user_visible_output_idxs"] = tensors  # they keep the strides of the trace
            return compile_fx_inner(module, inputs)
        graph.set_codegen(_BoxedCodeGen())  # it frees each value after its last use
        module.recompile()

        def run(values: list[Any]) -> Any:
            return module.forward(values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _report_gradients(self, graph: Graph, arrived: Arrived) -> None:
        """Make a backward call ``arrived`` as soon as it has the gradient of a plain parameter."""
        gradients: Any = output_of(graph).args[0]

        def report(name: str, gradient: Tensor) -> None:
            arrived(name, gradient)

        # Equal unless AOTAutograd took two inputs for one; then all gradients arrive at the end.
        same = len(gradients) == len(self._reported)
        for name, gradient in zip(self._reported, gradients, strict=True) if same else ():
            if name is not None and isinstance(gradient, Node):
                with graph.inserting_after(gradient):
                    graph.call_function(report, (name, gradient))


def _examples(captured: Captured, given: dict[str, Tensor], stack: ExitStack) -> list[Tensor]:
    """What a trace runs on: the given tensors or, if sizes are open, tensors without data. The
    trace then uses the symbols of these, within ``stack``."""
    if not captured.inputs.open:
        return list(given.values())
    nodes, names = captured.graph.nodes, captured.user_inputs
    symbolic = {node.name: node.meta["val"] for node in nodes if node.name in names}
    mode = next(iter(symbolic.values())).fake_mode
    stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(mode)))
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", message="Error detected in")  # one that is tried once more
    # DTensor compares costs by these bytes, for each op: with symbols this takes half of the time.
    stack.enter_context(mock.patch.object(_collective_utils, "spec_to_bytes", _example_bytes))
    return [
        symbolic[name].detach().requires_grad_(tensor.requires_grad)
        if name in symbolic
        else mode.from_tensor(tensor, static_shapes=True)
        for name, tensor in given.items()
    ]


def _example_bytes(spec: Any) -> int:
    """Bytes of a DTensor, with the example's sizes where sizes are open."""
    return spec.tensor_meta.dtype.itemsize * math.prod(example_shape(spec.shape))


def _for_inductor(stack: ExitStack) -> dict[str, Any]:
    """The options with which AOTAutograd traces for inductor, within ``stack``."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode

    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    stack.enter_context(V.set_fake_mode(fake_mode))
    stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(fake_mode)))
    partition = partial(save_regions, others=False)
    return {"partition_fn": partition, "decompositions": select_decomp_table()}
