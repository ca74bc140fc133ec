"""``parallelize`` with nnscaler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import nnscaler
import nnscaler.policies
from nnscaler.graph.function.dimops import IRDimops

from . import graph_report
from .op_node import OpNode, planned_for, register
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
    """Have nnscaler's own ``parallelize`` plan by :func:`_planned` too."""
    nnscaler.policies.fn = _planned


def _planned(graph: Any, cfg: Any, policy: Callable[..., Any]) -> Any:
    """nnscaler's ``policies.fn``: a graph cut by a policy, around which our calls are prepared for
    the ranks at hand, and have their tokens' order followed."""
    ranks = ranks_of_an_op(cfg)
    with planned_for(ranks):
        for node in graph.select(ntype=OpNode):
            node.annotate()
        shuffled = ShuffledGraph(graph)
        if policy is nnscaler.policies.pas_autodist:
            check_constraints(graph, cfg)
        cut = _plan(graph, cfg, policy)
        for n, part in enumerate(cut.select(ntype=OpNode)):
            part.number = n
        shuffled.mark(cut)
    _plans.append(graph_report.table(cut.select(ntype=IRDimops), cfg.plan_ngpus))
    _logger.info("%s", _plans[-1])
    return cut
