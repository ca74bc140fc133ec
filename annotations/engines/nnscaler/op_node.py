"""A call in nnscaler's graph, and the registration of declared functions with nnscaler."""

from __future__ import annotations

import importlib
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from nnscaler.autodist.cube_operator import CubeOperator
from nnscaler.graph.function.dimops import IRDimops, OpAnno
from nnscaler.graph.parser.register import CustomizedOps
from nnscaler.graph.tracer.operator_patcher import OperatorPatcher, OperatorPatcherContext
from nnscaler.ir.cten import IRTensor

from annotations.codegen.public_call import PublicCall, declared_calls, qualified
from annotations.rules import PartitionRule, SplitSite

from . import placement
from .generated_code import emit, imports_of
from .graph_values import on_meta, restored, traced, writable
from .timing import example_inputs, fake_of, timed

_logger = logging.getLogger(__name__)

_registered: dict[str, PublicCall] = {}  # by signature, also of parts
_ranks = 1  # ranks that calls traced now may be cut over

GROUP = "process_group"


def register() -> None:
    """Register every declared function that nnscaler does not know yet.

    Each has two names: nnscaler must trace the function itself, but times a function that takes the
    inputs by position alone.
    """
    for name, call in declared_calls().items():
        if name not in _registered:
            _register_timed(name, name, call)
            CustomizedOps.register(
                f"{name}.traced", make_node, imports_of(name), call.function, fake_fn=fake_of(call)
            )


def _register_timed(signature: str, name: str, call: PublicCall) -> None:
    _registered[signature] = call
    CustomizedOps.register(
        signature,
        make_node,
        imports_of(name),
        timed,
        emit_fn=emit,
        input_gen_fn=example_inputs,
    )


_rewritten = OperatorPatcher.patch_func_helper


def cut_however_small() -> None:
    """Make autodist cut our ops however small they are. Otherwise it replicates small ops that no
    parameter feeds, and a shuffle of labels would not be in the order of the tokens."""
    CubeOperator.has_batch_dim = property(
        lambda self: isinstance(self.ir_cell, OpNode) or self.__dict__["fed"],
        lambda self, fed: self.__dict__.update(fed=fed),
    )


def see_every_call() -> None:
    """Make nnscaler's tracer see every call of a registered function that a traced function makes.

    The tracer rewrites each function that a traced function calls, and puts its own in the place of
    a registered one if that is a name of the module of the function itself or of a module's class.
    Without this, it would trace into a call through a package
    (``ring_attention.wrap_ring_attn_func``), in another module's helper, from a table or of a
    ``functools.partial``.
    """
    OperatorPatcher.patch_func_helper = _seen


def _seen(patcher: OperatorPatcher, function: Any) -> Any:
    """What the tracer calls instead of ``function``, which is called by a traced function."""
    called = function.func if isinstance(function, partial) else function
    named = hasattr(called, "__module__") and hasattr(called, "__name__")
    call = _registered.get(qualified(called)) if named else None
    if call is None or call.function is not called:
        return _rewritten(patcher, function)
    _, wrapped = OperatorPatcherContext.ctx_tracer.wrapped_leaf[called]
    return wrapped if called is function else partial(wrapped, *function.args, **function.keywords)


@contextmanager
def planned_for(ranks: int) -> Iterator[None]:
    """Within this context, calls are traced to be cut over ``ranks``.

    This decides between the annotations of an op that has several: query heads are cut with their
    key heads if ``ranks`` divides these, and alone if not. Outside, always the former.
    """
    global _ranks
    before, _ranks = _ranks, ranks
    try:
        yield
    finally:
        _ranks = before


class OpNode(IRDimops):
    """A call in nnscaler's graph.

    nnscaler's own nodes are annotated again for each part, from the part's shapes. These keep their
    annotation, because a part may not show what it was cut from: one query head of two, say.

    Attributes:
        names: of the arguments among ``inputs()``; the others are ``kwargs``.
        base: the name that the call is declared by; a part's signature also says how it was cut.
        order: name of the order of its tokens, from a shuffle that the model calls itself; None if
            natural.
        number: the part's number, in the order of the graph. placed: all parts that have a device.
    """

    names: tuple[str, ...]
    base: str
    order: str | None = None
    number: int = 0
    placed: ClassVar[weakref.WeakSet[OpNode]] = weakref.WeakSet()

    @property
    def call(self) -> PublicCall:
        """The call of :attr:`base`. nnscaler times ops in new processes, which import this module
        alone: there the function's own module is imported now."""
        if self.base not in _registered:
            importlib.import_module(self.base.rpartition(".")[0])
            register()
        return _registered[self.base]

    @property
    def rule(self) -> PartitionRule:
        """The op's partition rule."""
        record, _ = self.call.op(on_meta(self._restored()))
        return record.rule

    def sites(self, inputs: Sequence[Any] | None = None) -> list[SplitSite]:
        """How a part with ``inputs``, by default its own, is cut; see :func:`.placement.sites`."""
        return placement.sites(self.anno, self.inputs() if inputs is None else inputs, self.rule)

    def new(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        *,
        no_grad_reduce_inputs: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> OpNode:
        """A part of this node, with other tensors; called by nnscaler."""
        call = self.call
        cut = "".join(f".{site.identifier}_in_{site.parts}" for site in self.sites(inputs))
        signature = self.base + cut
        if signature not in _registered:  # nnscaler keeps timings by signature and shapes alone
            _register_timed(signature, self.base, call)
        part = _node(signature, self.base, self.names, repr(self.anno), inputs, kwargs)
        if no_grad_reduce_inputs is not None:
            part._no_grad_reduce_inputs = no_grad_reduce_inputs
        for n, output in enumerate(outputs):
            part.set_output(n, output)
        return part

    def annotate(self) -> None:
        """Choose again between alternative annotations, for the ranks that are planned for. A graph
        that nnscaler kept may have been traced for another number."""
        text = _annotation(self.call, self.names, self._restored())
        annotation = OpAnno(text)
        assert self.align(self.signature, self.inputs(), annotation, dict(self.kwargs)), text
        self._annos_candidates, self._anno = (text,), annotation
        self._iannos, self._oannos = annotation.inputs(), annotation.outputs()

    @property
    def device(self) -> tuple[int, ...]:
        """The device that the part runs on."""
        return super().device

    @device.setter
    def device(self, devices: int | Sequence[int]) -> None:
        IRDimops.device.fset(self, devices)
        self.placed.add(self)

    def arguments(self) -> dict[str, Any]:
        """All arguments of the call, by name."""
        return {**dict(zip(self.names, self.inputs(), strict=True)), **self.kwargs}

    def _restored(self) -> dict[str, Any]:
        return {name: restored(value) for name, value in self.arguments().items()}


def _node(
    signature: str,
    base: str,
    names: tuple[str, ...],
    annotation: str,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> OpNode:
    name = base.rpartition(".")[2]
    node = OpNode(_never, name, signature, [annotation], list(inputs), **kwargs)
    node.names, node.base = names, base
    return node


def _never(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("OpNode.new makes parts itself")


def make_node(*args: Any, signature: str, **kwargs: Any) -> OpNode:
    """The node of a call; nnscaler calls this with the arguments of the traced call.

    Raises:
        BindingError: shapes do not fit the annotation.
    """
    call = _registered[signature]
    bound_call = call.signature.bind(*args, **kwargs)
    bound_call.apply_defaults()
    arguments = {name: restored(value) for name, value in bound_call.arguments.items()}
    if arguments.get(GROUP) is not None:
        _logger.warning("%s: process_group is the engine's to fill in; dropped", signature)
        arguments[GROUP] = None
    keyword_only = {p.name for p in call.signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    tensors = {name for name, x in arguments.items() if isinstance(x, IRTensor)}
    names = [name for name in arguments if name not in keyword_only]
    names += [name for name in arguments if name in keyword_only and name in tensors]
    return _node(
        signature,
        signature,
        tuple(names),
        _annotation(call, names, arguments),
        [writable(arguments[name]) for name in names],
        {name: writable(value) for name, value in arguments.items() if name not in names},
    )


def _annotation(call: PublicCall, names: Sequence[str], arguments: Mapping[str, Any]) -> str:
    """The annotation of a call whose inputs are ``names``, for the ranks that are planned for."""
    bound, shapes = call.shapes(on_meta(arguments), _ranks)
    inputs = ", ".join(str(shapes.get(name, "?")) for name in names)
    outputs = bound.annotation.outputs[: call.outputs(traced(dict(arguments)))]
    return f"{inputs} -> {', '.join(map(str, outputs))}"
