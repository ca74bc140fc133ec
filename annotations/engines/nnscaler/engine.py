"""The nnscaler engine: declared functions become nnscaler ops, cut and emitted by our rules.

Importing this module registers every declared function (:mod:`annotations.codegen.public_call`)
with nnscaler; functions declared later are registered as they are declared, ops of ``register_op``
at the next :func:`register`, which :func:`parallelize` calls. Written for nnscaler 0.9.

trace     wrap_ring_attn_func(q, k, v)          fake: shapes only, nothing is computed
graph     OpNode: annotated from our annotation, whatever arguments the call was made with
cut       parts of the node, told which part they are (``q_heads=(1, 2)``)
profile   a part is timed on what it will really do: with keys that other ranks hold
emit      wrap_ring_attn_func(q=..., process_group=[2, 3])
"""

from __future__ import annotations

import ast
import importlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nnscaler
import nnscaler.policies
import numpy as np
import torch
import yaml
from nnscaler.graph.function.dimops import IRDimops, OpAnno
from nnscaler.graph.parser.register import CustomizedOps
from nnscaler.ir.cten import IRObject, IRTensor
from torch import Tensor

from annotations.codegen import public_call as calls
from annotations.codegen.constants import from_text, is_text, to_text
from annotations.codegen.public_call import PublicCall, qualified, without_data
from annotations.engines.nnscaler import graph_report, placement
from annotations.engines.nnscaler.following import follow, ways_of
from annotations.errors import PartitionError
from annotations.record import AnnotatedOp
from annotations.rules import PartitionRule, SplitSite

_logger = logging.getLogger(__name__)

_WRITTEN = (int, float, bool, str, bytes, type(None))

_registered: dict[str, PublicCall] = {}
_placed: weakref.WeakSet[OpNode] = weakref.WeakSet()  # parts that have a device
_ranks = 1  # how many ranks nodes made now may be cut over

GROUP = "process_group"


def register() -> None:
    """Register every declared function that nnscaler does not know yet."""
    for name, call in calls.declared_calls().items():
        if name not in _registered:
            _register(name, call)


def _register(name: str, call: PublicCall) -> None:
    """Under two names: what nnscaler traces must be the function itself, what it times is called
    with the inputs by position alone."""
    _register_parts(name, name, call)
    code, fake = _imports(name), _fake_of(call)
    CustomizedOps.register(f"{name}.traced", make_node, code, call.function, fake_fn=fake)


def _register_parts(signature: str, name: str, call: PublicCall) -> None:
    _registered[signature] = call
    CustomizedOps.register(
        signature,
        make_node,
        _imports(name),
        timed,
        emit_fn=emit,
        input_gen_fn=example_inputs,
    )


def _imports(name: str) -> str:
    ours = [f"annotations.{m}" for m in ("codegen.constants", "codegen.gradient_shares", "groups")]
    modules = [*ours, name.rpartition(".")[0]]
    return "\n".join(f"import {module}" for module in modules if module != "__main__")


def _call_of(base: str) -> PublicCall:
    """The call of an op's signature. nnscaler times ops in new processes, which import nothing but
    this module: there the function's own is imported now."""
    if base not in _registered:
        importlib.import_module(base.rpartition(".")[0])
        register()
    return _registered[base]


@contextmanager
def planned_for(ranks: int) -> Iterator[None]:
    """Within, calls are traced to be cut over ``ranks``.

    That decides between the annotations of an op that has several: query heads are cut with their
    key heads where ``ranks`` divides these, and alone where not. Without it, always the former.
    """
    global _ranks
    before, _ranks = _ranks, ranks
    try:
        yield
    finally:
        _ranks = before


class OpNode(IRDimops):
    """A call in nnscaler's graph.

    nnscaler's own nodes are annotated anew for each part, from the part's shapes. These keep their
    annotation, because a part may not show what it was cut from: one query head of two, say.

    Attributes:
        names: of the arguments among ``inputs()``; the others are ``kwargs``.
        base: the name that the call is declared by; a part's signature also says how it was cut.
    """

    names: tuple[str, ...]
    base: str

    def new(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        *,
        no_grad_reduce_inputs: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> OpNode:
        """A part of this, with other tensors; called by nnscaler."""
        call = _call_of(self.base)
        cut = "".join(f".{site.identifier}_in_{site.parts}" for site in _sites(self, inputs))
        signature = self.base + cut
        if signature not in _registered:  # timings are filed by signature and shapes alone
            _register_parts(signature, self.base, call)
        part = _node(signature, self.base, self.names, repr(self.anno), inputs, kwargs)
        if no_grad_reduce_inputs is not None:
            part._no_grad_reduce_inputs = no_grad_reduce_inputs
        for n, output in enumerate(outputs):
            part.set_output(n, output)
        return part

    def annotate(self) -> None:
        """Choose anew between alternative annotations, for the ranks that are planned for. A graph
        that nnscaler kept may have been traced for another number."""
        arguments = {name: _restored(value) for name, value in self.arguments().items()}
        text = _annotation(_call_of(self.base), self.names, arguments)
        annotation = OpAnno(text)
        assert self.align(self.signature, self.inputs(), annotation, dict(self.kwargs)), text
        self._annos_candidates, self._anno = (text,), annotation
        self._iannos, self._oannos = annotation.inputs(), annotation.outputs()

    @property
    def device(self) -> tuple[int, ...]:
        """Where the part runs."""
        return super().device

    @device.setter
    def device(self, devices: int | Sequence[int]) -> None:
        IRDimops.device.fset(self, devices)
        _placed.add(self)

    def arguments(self) -> dict[str, Any]:
        """All arguments of the call, by name."""
        return {**dict(zip(self.names, self.inputs(), strict=True)), **self.kwargs}


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
    """The graph's node of a call; nnscaler calls this with the arguments of the traced call.

    Raises:
        BindingError: shapes do not fit the annotation.
    """
    call = _registered[signature]
    bound_call = call.signature.bind(*args, **kwargs)
    bound_call.apply_defaults()
    arguments = {name: _restored(value) for name, value in bound_call.arguments.items()}
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
        [_plain(arguments[name]) for name in names],
        {name: _plain(value) for name, value in arguments.items() if name not in names},
    )


def _annotation(call: PublicCall, names: Sequence[str], arguments: Mapping[str, Any]) -> str:
    """Of a call whose inputs are ``names``, to be cut over as many ranks as are planned for."""
    bound, shapes = call.shapes(_meta(arguments), _ranks)
    inputs = ", ".join(str(shapes.get(name, "?")) for name in names)
    outputs = bound.annotation.outputs[: call.outputs(_value(dict(arguments)))]
    return f"{inputs} -> {', '.join(map(str, outputs))}"


def _value(x: Any) -> Any:
    """``x`` with what nnscaler computes at run time replaced by its value while tracing."""
    if isinstance(x, dict):
        return {key: _value(each) for key, each in x.items()}
    if isinstance(x, list | tuple):
        return type(x)([_value(each) for each in x])
    return x.value if isinstance(x, IRObject) and not isinstance(x, IRTensor) else x


def _meta(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: without_data(tuple(x.shape), x.dtype) if isinstance(x, IRTensor) else x
        for name, x in _value(dict(arguments)).items()
    }


def _plain(value: Any) -> Any:
    """As generated code can hold it: what Python does not write as it reads it is text."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, IRObject | torch.dtype) or type(value) in _WRITTEN:
        return to_text(value) if value != value else value  # nan is a name
    if type(value) in (list, tuple):
        each = [_plain(x) for x in value]
        return to_text(value) if any(map(is_text, each)) else type(value)(each)
    return to_text(value)


def _restored(value: Any) -> Any:
    return from_text(value) if is_text(value) else value


def _rule(node: OpNode) -> PartitionRule:
    known = {name: _restored(value) for name, value in node.arguments().items()}
    record, _ = _call_of(node.base).op(_meta(known))
    return record.rule


def _sites(node: OpNode, inputs: Sequence[Any]) -> list[SplitSite]:
    return placement.sites(node.anno, inputs, _rule(node))


def emit(
    node: OpNode,
    args: Sequence[str],
    kwargs: Mapping[str, str],
    runtime_devid: int,
    plan_ndevs: int,
    runtime_ndevs: int,
) -> str:
    """The code of a part's call; nnscaler calls this.

    Args:
        args, kwargs: code of the arguments.
        runtime_devid: global rank of the device that runs it; plan_ndevs: ranks of a scale unit.
    Raises:
        PartitionError: the parts of an op that communicates inside do not lie in rank order.
    """
    call = _call_of(node.base)
    offset = runtime_devid // plan_ndevs * plan_ndevs
    code = dict(zip(node.names, args, strict=True)) | dict(kwargs)
    function, groups = call.function, {}
    sites = _sites(node, node.inputs())
    for site in sites:
        ranks: tuple[int, ...] = ()
        if site.group:
            ranks = tuple(d + offset for d in placement.devices(node, site, _placed))
            groups[repr(site.group)] = f"annotations.groups.name_of_ranks({ranks})"
            function = call.when_cut or function
        told = call.arguments(replace(site, ranks=ranks))
        code |= {name: repr(value) for name, value in told.items() if name in code}
    parameters = call.signature.parameters
    written = [
        f"{name}={_code(groups.get(text, text))}"
        for name, text in code.items()
        if text != repr(parameters[name].default)
    ]
    made = f"{_target(function)}({', '.join(written)})"
    parts = placement.divisors(node.anno, node.outputs(), sites, _rule(node))
    return (
        f"annotations.codegen.gradient_shares.divided({made}, {parts})" if max(parts) > 1 else made
    )


def _target(function: Any) -> str:
    """How generated code calls a function; an op by its name in ``torch.ops``."""
    if isinstance(function, AnnotatedOp):
        return f"torch.ops.{function.record.name.replace('::', '.')}"
    return qualified(function)


def _code(text: str) -> str:
    if text[:1] in "'\"" and is_text(ast.literal_eval(text)):
        return f"annotations.codegen.constants.from_text({text})"
    return text


def _fake_of(call: PublicCall) -> Any:
    def fake(*args: Any, **kwargs: Any) -> Any:
        """Results of the right shapes, with nothing computed; they ask for gradients as real ones
        do, or nnscaler would leave the backward out."""
        bound = call.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        record, given = call.op(bound.arguments)
        results = record.empty_results({**dict.fromkeys(record.signature.parameters), **given})
        learns = any(
            isinstance(given.get(name), Tensor) and given[name].requires_grad
            for name in record.differentiable
        )
        for result in results:
            result.requires_grad_(learns and result.is_floating_point())
        results = results[: call.outputs(bound.arguments)]
        return results if len(results) > 1 else results[0]

    return fake


@dataclass(frozen=True)
class _Rest:
    """What a call that is timed needs beside its node's inputs; passed on as the last of them.

    Attributes:
        names: of the inputs. arguments: that are none.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    arguments: Mapping[str, Any]


def timed(*inputs: Any, **as_in_code: Any) -> Any:
    """What nnscaler runs to time any op, with :func:`example_inputs`."""
    *given, rest = inputs
    return rest.function(**dict(zip(rest.names, given, strict=True)), **rest.arguments)


def example_inputs(node: OpNode) -> tuple[Any, ...]:
    """Arguments to time a part with: its inputs in order, and the rest in one.

    Time on the wire is not in it: one device has no peers, and most of it passes while kernels run.
    """
    call = _call_of(node.base)
    device = torch.cuda.current_device()

    def example(value: Any) -> Any:
        if not isinstance(value, IRTensor):
            return _restored(_value(value))
        shape, dtype = tuple(value.shape), value.dtype
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.randn(shape, dtype=dtype, device=device, requires_grad=value.requires_grad)

    arguments = {name: example(value) for name, value in node.arguments().items()}
    sites = _sites(node, node.inputs())
    for site in sites:
        arguments |= {n: v for n, v in call.arguments(site).items() if n in arguments}
    if call.fake_peers is not None:
        arguments |= call.fake_peers(arguments, sites)
    rest = {name: value for name, value in arguments.items() if name not in node.names}
    return *(arguments[name] for name in node.names), _Rest(call.function, node.names, rest)


def cuts_inside(graph: Any, ranks: int) -> dict[OpNode, tuple[int, int]]:
    """For every op of ``graph`` that is cut on its sequence, the input and dim of that cut.

    It is a split of ``l`` that communicates inside, as attention's does; or where k and v are to be
    gathered before the op (``q_rows``), one of the rows of q.

    Raises:
        PartitionError: it cannot be cut so over ``ranks``; says why.
    """
    found = {}
    for node in graph.select(ntype=OpNode):
        rule, present = _rule(node), set(node.anno.identifiers)
        sequence = {"lq"}.intersection(rule.told) | {"l"}.intersection(rule.communicates)
        for name in sequence & present:
            ways = ways_of(node, ranks)
            way = next((w for w in ways if _identifier(node, w.cut) == name), None)
            if way is None:
                size = node.anno.getlen(name)
                raise PartitionError(
                    f"a call in {node.fqn or 'the module'} cannot be cut on {name!r} over {ranks} "
                    f"ranks: {name!r} = {size}, and nnscaler cuts into equal parts",
                    details=[f"expected: a multiple of {ranks}; pad the sequence"],
                    op=node.name,
                )
            found[node] = way.cut
    return found


def _identifier(node: OpNode, cut: tuple[int, int]) -> str:
    return placement.leading(node.anno.input(cut[0]).dims[cut[1]])


def follow_policy(graph: Any, cfg: Any) -> Iterator[Any]:
    """Attention is cut on its sequence; all other ops follow their neighbours. Searches nothing."""
    nodes = nnscaler.policies.get_pas_ops(graph)
    cuts = follow(nodes, cuts_inside(graph, cfg.plan_ngpus), cfg.plan_ngpus)
    for node, cut in cuts.items():
        partition = nnscaler.policies.OpPartition(*cut) if cut else None
        yield nnscaler.policies.OpPlan(node, partition=partition)


def constraints(graph: Any, ranks: int) -> list[dict[str, Any]]:
    """nnscaler's partition constraints that pin attention to its sequence, as its yaml has them.

    Raises:
        PartitionError: calls of one function have it in different places, which constraints, being
            by function, cannot say.
    """
    dims: dict[str, set[str]] = {}
    for node, (index, dim) in cuts_inside(graph, ranks).items():
        dims.setdefault(node.signature, set()).add(f"{index},{dim}")
    for name, places in dims.items():
        if len(places) > 1:
            raise PartitionError(
                "some calls are of packed documents and some are not, and autodist's constraints "
                "cannot tell them apart",
                details=["expected: one kind of call of it, or the policy 'cp_follow'"],
                op=name.rpartition(".")[2],
            )
    return [
        {
            "name": name,
            "parent_module": "",
            "allowed_partition_dims": sorted(allowed),
            "replica_allowed": False,
        }
        for name, allowed in sorted(dims.items())
    ]


def cp_policy(graph: Any, cfg: Any) -> Any:
    """Attention is cut on its sequence; all other ops are left to autodist.

    Constraints of the user's own (``pas_config["partition_constraints_path"]``) stay in force.
    """
    given = cfg.pas_config.get("partition_constraints_path", "")
    own = (yaml.safe_load(Path(given).read_text()) if given else None) or []
    if not isinstance(own, list):
        raise ValueError(f"partition_constraints_path: {given} must hold a list, got {own!r}")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "constraints.yaml"
        path.write_text(yaml.safe_dump(own + constraints(graph, _ranks_of_an_op(cfg))))
        pas_config = {**cfg.pas_config, "partition_constraints_path": str(path)}
        return nnscaler.policies.pas_autodist(graph, replace(cfg, pas_config=pas_config))


POLICIES = {"cp": cp_policy, "cp_follow": follow_policy}


def as_config(config: Any) -> Any:
    """nnscaler's form of a ComputeConfig of either kind."""
    if isinstance(config, nnscaler.ComputeConfig):
        return config
    return nnscaler.ComputeConfig(**{f.name: getattr(config, f.name) for f in fields(config)})


def _ranks_of_an_op(config: Any) -> int:
    """How many ranks one op is cut over at most: less than all where these are stages, or where a
    policy cuts each op on two dims."""
    return int(config.pas_config.get("max_partition_degree", config.plan_ngpus))


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise what is wrong with the call or the plan itself; nnscaler raises "Code generation
    failed." from it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, ValueError | NotImplementedError):
            raise error.__cause__ from None
        raise


def parallelize(
    module_or_module_class: Any,
    dummy_forward_args: Mapping[str, Any],
    pas_policy: str | Callable[..., Any],
    compute_config: Any,
    **options: Any,
) -> Any:
    """nnscaler's ``parallelize``, with this module's policies too and ``plan`` on what it returns.

    ``plan`` is a table of what every op was cut on; None on ranks other than 0 and where earlier
    code was used again. See :func:`annotations.parallelize`.

    ``pas_config["max_partition_degree"]`` is how many ranks one op is cut over, where that is not
    all of ``plan_ngpus``. It decides whether heads of q are cut with those of k or alone.

    Raises:
        ValueError, NotImplementedError: on rank 0, what is wrong with a call or the plan; on the
            others nnscaler's RuntimeError.
    """
    if isinstance(pas_policy, str):
        named = POLICIES.get(pas_policy) or getattr(nnscaler.policies, f"pas_{pas_policy}", None)
        if named is None:
            theirs = (n.removeprefix("pas_") for n in dir(nnscaler.policies) if n[:4] == "pas_")
            known = ", ".join([*POLICIES, *theirs])
            raise ValueError(f"pas_policy {pas_policy!r} is unknown to nnscaler; known: {known}")
        pas_policy = named
    register()  # ops that came by register_op since
    plans: list[str] = []

    def planned(graph: Any, cfg: Any) -> Any:
        for node in graph.select(ntype=OpNode):
            node.annotate()
        cut = nnscaler.policies.fn(graph, cfg, pas_policy)
        plans.append(graph_report.table(cut.select(ntype=IRDimops), cfg.plan_ngpus))
        _logger.info("%s", plans[-1])
        return cut

    with planned_for(_ranks_of_an_op(compute_config)), _own_errors():
        made = nnscaler.parallelize(
            module_or_module_class, dict(dummy_forward_args), planned, compute_config, **options
        )
    if made is not None:
        made.plan = plans[-1] if plans else None
    return made


register()
calls.on_declare(register)
