"""Policies that cut attention on its sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nnscaler
import nnscaler.policies
import yaml

from annotations.errors import PartitionError

from . import placement
from .following import follow, ways_of
from .op_node import OpNode


def cuts_inside(graph: Any, ranks: int) -> dict[OpNode, tuple[int, int]]:
    """For every op of ``graph`` that is cut on its sequence, the input and dim of that cut.

    It is a split of ``l`` that communicates inside, as attention's does; or, if k and v are
    gathered before the op (``q_rows``), a split of the rows of q.

    Raises:
        PartitionError: an op cannot be cut so over ``ranks``; says why.
    """
    found = {}
    for node in graph.select(ntype=OpNode):
        rule, present = node.rule, set(node.anno.identifiers)
        sequence = {"lq"}.intersection(rule.told) | {"l"}.intersection(rule.communicates)
        for name in sequence & present:
            ways = ways_of(node, ranks)
            way = next((w for w in ways if _identifier(node, w.cut) == name), None)
            if way is None:
                raise _uneven(node, name, ranks)
            found[node] = way.cut
    if not found:
        raise PartitionError(
            "the policy cuts attention on its sequence, and no call of it is seen in the model",
            details=[
                "expected: a wrap_*_attn_func called in the model's modules or in functions that "
                "they call; calls made by compiled code (map, functools.reduce) are not seen",
            ],
        )
    return found


def _uneven(node: OpNode, name: str, ranks: int) -> PartitionError:
    return PartitionError(
        f"a call in {node.fqn or 'the module'} cannot be cut on {name!r} over {ranks} ranks: "
        f"{name!r} = {node.anno.getlen(name)}, and nnscaler cuts into equal parts",
        details=[f"expected: a multiple of {ranks}; pad the sequence"],
        op=node.name,
    )


def _identifier(node: OpNode, cut: tuple[int, int]) -> str:
    return placement.leading(node.anno.input(cut[0]).dims[cut[1]])


def follow_policy(graph: Any, cfg: Any) -> Iterator[Any]:
    """Attention is cut on its sequence; all other ops follow their neighbours, without a search.

    Raises:
        ValueError: ops are to be cut over fewer ranks than all, which nnscaler has no plan for.
    """
    if ranks_of_an_op(cfg) != cfg.plan_ngpus:
        raise ValueError(
            f"pas_policy 'cp_follow' cuts ops over all {cfg.plan_ngpus} ranks; leave out "
            f"max_partition_degree, got {ranks_of_an_op(cfg)}"
        )
    nodes = nnscaler.policies.get_pas_ops(graph)
    cuts = follow(nodes, cuts_inside(graph, cfg.plan_ngpus), cfg.plan_ngpus)
    for node, cut in cuts.items():
        partition = nnscaler.policies.OpPartition(*cut) if cut else None
        yield nnscaler.policies.OpPlan(node, partition=partition)


def constraints(graph: Any, ranks: int) -> list[dict[str, Any]]:
    """nnscaler's partition constraints that cut attention on its sequence, as its yaml has them.

    Raises:
        PartitionError: calls of one function need different cuts, but constraints are by function.
    """
    dims: dict[str, set[str]] = {}
    for node, (index, dim) in cuts_inside(graph, ranks).items():
        dims.setdefault(node.signature, set()).add(f"{index},{dim}")
    for name, allowed in dims.items():
        if len(allowed) > 1:
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

    The user's own constraints (``pas_config["partition_constraints_path"]``) stay in force.
    """
    own = _own_constraints(cfg)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "constraints.yaml"
        path.write_text(yaml.safe_dump(own + constraints(graph, ranks_of_an_op(cfg))))
        pas_config = {**cfg.pas_config, "partition_constraints_path": str(path)}
        return nnscaler.policies.pas_autodist(graph, replace(cfg, pas_config=pas_config))


def _own_constraints(cfg: Any) -> list[dict[str, Any]]:
    given = cfg.pas_config.get("partition_constraints_path", "")
    own = (yaml.safe_load(Path(given).read_text()) if given else None) or []
    if not isinstance(own, list):
        raise ValueError(f"partition_constraints_path: {given} must hold a list, got {own!r}")
    return own


def check_constraints(graph: Any, cfg: Any) -> None:
    """Refuse the user's constraints where they leave autodist no way to run a call of ours.

    Raises:
        PartitionError: names the call, the constraint, and what would fit.
    """
    ranks, ours = ranks_of_an_op(cfg), graph.select(ntype=OpNode)
    own = _own_constraints(cfg) if ours and ranks > 1 else []
    for node in ours:
        rule = _in_force(own, node)
        if rule is None or rule.get("replica_allowed", True):
            continue
        names = {
            f"{index},{n}": placement.leading(dim)
            for index, shape in enumerate(node.anno.inputs())
            if not shape.ignore
            for n, dim in enumerate(shape.dims)
        }
        given = [str(dim).replace(" ", "") for dim in rule["allowed_partition_dims"]]
        allowed = [names[dim] for dim in given if dim in names]
        possible = {_identifier(node, way.cut) for way in ways_of(node, ranks)}
        if possible.intersection(allowed):
            continue
        if allowed and node.anno.getlen(allowed[0]) % ranks:
            raise _uneven(node, allowed[0], ranks)
        cuts = sorted(dim for dim, name in names.items() if name in possible)
        raise PartitionError(
            f"a call in {node.fqn or 'the module'} cannot be cut over {ranks} ranks as its "
            f"constraint says: replica_allowed is false, and allowed_partition_dims are {given}",
            details=[f"expected: some of {cuts}, or replica_allowed: true"],
            op=node.name,
        )


def _in_force(rules: Iterable[Mapping[str, Any]], node: OpNode) -> Mapping[str, Any] | None:
    """The constraint on a call that autodist takes: the one with the longest ``parent_module`` that
    is found in the class names of the modules around the call."""
    around = ".".join(kind.__name__ for kind in node.module_stack.values())
    found = [
        rule
        for rule in rules
        if rule["name"] == node.signature and (rule.get("parent_module") or "") in around
    ]
    return max(found, key=lambda rule: len(rule.get("parent_module") or ""), default=None)


def ranks_of_an_op(config: Any) -> int:
    """The most ranks that one op is cut over: fewer than all with pipeline stages, or with a policy
    that cuts each op on two dims."""
    return int(config.pas_config.get("max_partition_degree", config.plan_ngpus))


POLICIES = {"cp": cp_policy, "cp_follow": follow_policy}
