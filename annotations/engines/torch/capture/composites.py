"""Composite ops of a program that torch traces again: they stay as they are.

torch tells each of its 500 composite ops, one by one, to stay. Of a small model this is most of the
time. Those in the program are enough: what comes up inside of others, as meshgrid does in
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
_lock = threading.Lock()  # of torch's list, which threads share


@contextmanager
def kept_of(exported: torch.export.ExportedProgram) -> Iterator[None]:
    """Within it, ``exported.run_decompositions({})`` looks at the program's own ops alone."""
    if may_stay is None or not hasattr(exported_program, EVERY):
        yield  # a torch that goes about it in another way
        return
    parts = [part for part in exported.graph_module.modules() if isinstance(part, GraphModule)]
    targets = {node.target for part in parts for node in part.graph.nodes}
    kept = {op for op in targets if isinstance(op, OpOverload) and may_stay(op)}
    with _lock, mock.patch.object(exported_program, EVERY, lambda: kept):
        yield
