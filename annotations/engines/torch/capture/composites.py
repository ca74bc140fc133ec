"""Keeps the composite ops of a program as they are when torch traces it again.

torch does this for each of its 500 composite ops, one by one. For a small model that is most of the
time. Those in the program are enough: one that appears inside of another, as meshgrid does in
cartesian_prod, may become several ops.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch._export import utils
from torch._ops import OpOverload
from torch.export import exported_program
from torch.fx import GraphModule

EVERY = "_collect_all_valid_cia_ops"  # what lists them, in torch 2.11 and 2.13
may_stay = getattr(utils, "_is_preservable_cia_op", None)
_lock = threading.Lock()  # for torch's list, which threads share


@contextmanager
def kept_of(exported: torch.export.ExportedProgram) -> Iterator[None]:
    """While inside, ``exported.run_decompositions({})`` looks only at the program's own ops."""
    if may_stay is None or not hasattr(exported_program, EVERY):
        yield  # a version of torch that does this in another way
        return
    parts = [part for part in exported.graph_module.modules() if isinstance(part, GraphModule)]
    targets = {node.target for part in parts for node in part.graph.nodes}
    kept = {op for op in targets if isinstance(op, OpOverload) and may_stay(op)}
    with _lock, mock.patch.object(exported_program, EVERY, lambda: kept):
        yield
