"""Custom ops with annotations, for auto-parallelizers and for calling directly.

| page | about |
|---|---|
| `customized_ops.ring_attention` | attention: options, errors, kernels |
| `customized_ops.ring_attention.core.mask` | which pairs attend |
| `customized_ops.ring_attention.core.layout` | which rank holds which tokens |
| `customized_ops.ring_attention.core.plan` | who computes what, and what moves |
| `customized_ops.ring_attention.core.kernels` | attention on one device |
| `customized_ops.ring_attention.core` | design: numerics, speed, decisions |
| `customized_ops.ring_attention.api` | other packages' names |
| `customized_ops.ring_attention.api.transformers` | Hugging Face models |
| `customized_ops.linear_attention` | linear attention, state spaces, the gated delta rule |
| `customized_ops.causal_conv1d` | short convolutions |
| `customized_ops.along_sequence` | adding an op along a sequence |
| `customized_ops.chunk_linear_cross_entropy` | the loss without its logits |
| `annotations` | annotating an op |
| `annotations.engines.torch` | planning and training a whole model |
| `annotations.engines` | nnscaler |
| `benchmark` | what was measured |
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__: list[str] = []  # its modules are imported by their names


class _FoldersBeside:
    """Finds modules in folders of this package's name that have no ``__init__.py``, as a user's
    beside his script: Python itself looks no further than a package that has one. A user's own
    module comes first, but for ``ring_attention``, which the modules here are made of."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = name.rpartition(".")
        if package != __name__ or module == "ring_attention":
            return None
        folders = [os.path.join(entry, __name__) for entry in sys.path if isinstance(entry, str)]
        made = [os.path.join(folder, "__init__.py") for folder in folders]
        plain = [f for f, init in zip(folders, made, strict=True) if not os.path.exists(init)]
        found = PathFinder.find_spec(name, plain)
        if found is not None and found.origin is None and PathFinder.find_spec(name, path):
            return None  # a folder without modules of its own, such as a rest of one
        return found


sys.meta_path.insert(0, _FoldersBeside)
