"""``parallelize`` with nnscaler."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import nnscaler
import nnscaler.policies
from nnscaler.graph.function.dimops import IRDimops

from .op_node import OpNode, planned_for, register
from .parameters import check_parameters
from .placement import leading
from .sequence_policies import POLICIES, check_constraints, ranks_of_an_op
from .shuffled_parts import ShuffledGraph

_logger = logging.getLogger(__name__)

_plan = nnscaler.policies.fn
_plans: list[str] = []  # of the calls of ``parallelize`` under way


def as_config(config: Any) -> Any:
    """A ComputeConfig of this package or of nnscaler as nnscaler's."""
    if isinstance(config, nnscaler.ComputeConfig):
        return config
    return nnscaler.ComputeConfig(**{f.name: getattr(config, f.name) for f in fields(config)})


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the error about the call or the plan itself: nnscaler raises "Code generation failed."
    from it."""
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
    """nnscaler's ``parallelize`` with the policies of :mod:`.sequence_policies`, and with ``plan``.

    The result's ``plan`` is a table of what every op was cut on; None on ranks other than 0 and if
    earlier code was used again. See :func:`annotations.parallelize`.

    ``pas_config["max_partition_degree"]`` is the number of ranks that one op is cut over, if not
    all of ``plan_ngpus``. It decides whether heads of q are cut with those of k or alone.

    Raises:
        ValueError, NotImplementedError: on rank 0, for a wrong call or plan; other ranks raise
            nnscaler's RuntimeError.
    """
    if isinstance(pas_policy, str):
        named = POLICIES.get(pas_policy) or getattr(nnscaler.policies, f"pas_{pas_policy}", None)
        if named is None:
            theirs = (n.removeprefix("pas_") for n in dir(nnscaler.policies) if n[:4] == "pas_")
            known = ", ".join([*POLICIES, *theirs])
            raise ValueError(f"pas_policy {pas_policy!r} is unknown to nnscaler; known: {known}")
        pas_policy = named
    register()  # ops of register_op
    _plans.clear()
    with _own_errors():
        made = nnscaler.parallelize(
            module_or_module_class, dict(dummy_forward_args), pas_policy, compute_config, **options
        )
    if made is not None:
        made.plan = _plans[-1] if _plans else None
    return made


def plan_with_ours() -> None:
    """Make nnscaler's own ``parallelize`` plan by :func:`_planned` too."""
    nnscaler.policies.fn = _planned


def _planned(graph: Any, cfg: Any, policy: Callable[..., Any]) -> Any:
    """Stands in for nnscaler's ``policies.fn``, which cuts a graph by a policy: also prepares our
    calls for the ranks at hand, and follows the order of their tokens."""
    ranks = ranks_of_an_op(cfg)
    with planned_for(ranks):
        for node in graph.select(ntype=OpNode):
            node.annotate()
        shuffled = ShuffledGraph(graph)
        if policy is nnscaler.policies.pas_autodist:
            policy = _for_autodist()
            check_constraints(graph, cfg)
        cut = _plan(graph, cfg, policy)
        for n, part in enumerate(cut.select(ntype=OpNode)):
            part.number = n
        shuffled.mark(cut)
        check_parameters(nnscaler.policies.get_pas_ops(cut))
    _plans.append(_table(cut.select(ntype=IRDimops), cfg.plan_ngpus))
    _logger.info("%s", _plans[-1])
    return cut


def _for_autodist() -> Callable[..., Any]:
    """The policy for a program that asks for autodist: ``SEQSHARD_AUTODIST`` may name one of ours.

    Raises:
        ValueError: it names no policy of :data:`POLICIES`.
    """
    name = os.environ.get("SEQSHARD_AUTODIST", "")
    if name and name not in POLICIES:
        raise ValueError(f"SEQSHARD_AUTODIST is {name!r}; expected one of {list(POLICIES)}")
    return POLICIES[name] if name else nnscaler.policies.pas_autodist


def _table(nodes: Iterable[Any], ranks: int) -> str:
    """How ops were cut: a line for all ops of one name and cut.

    Args:
        nodes: the parts of all ops. ranks: of a scale unit.
    """
    cuts: dict[tuple[str, Any], str] = {}  # by name and first whole result, so one for each op
    for node in nodes:
        results = [t.parent for t in node.outputs() if hasattr(t, "parent")]
        if results and hasattr(node, "anno"):
            cuts.setdefault((node.name, results[0]), _cut(node))
    rows = Counter((name, cut) for (name, _), cut in cuts.items())
    lines = [("op", "count", "cut on"), *((name, str(n), cut) for (name, cut), n in rows.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    text = ["  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)) for line in lines]
    rule = "-" * (sum(widths) + 4)
    title = f"plan: {ranks} ranks a scale unit"
    return "\n".join(line.rstrip() for line in [title, text[0], rule, *text[1:]])


def _cut(node: Any) -> str:
    found = {}
    for shape, tensor in zip(node.anno.inputs(), node.inputs(), strict=True):
        if not hasattr(tensor, "parent") or shape.ignore:
            continue
        for n, dim in enumerate(shape.dims):
            if tensor.shape[n] != tensor.parent.shape[n]:
                name = leading(dim)
                found[name] = f"{name} / {tensor.parent.shape[n] // tensor.shape[n]}"
    return ", ".join(found.values()) or "whole"
