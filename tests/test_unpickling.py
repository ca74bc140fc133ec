"""What the packages unpickle: constants of generated code, and nothing of a file of data."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from doc_blocks import ROOT

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {"torch.load", "np.load", "numpy.load", "pd.read_pickle", "torch.serialization.load"}
NAMES = {"load": ("torch", "numpy", "torch.serialization"), "read_pickle": ("pandas",)}
KNOWN = {
    "annotations/codegen/constants.py",  # of Python that nnscaler generated, which runs anyway
    "annotations/engines/torch/plan/rank_agreement.py",  # an error that it pickled just before
}


def unpickling(text: str) -> Iterator[str]:
    """What in a module could unpickle something."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] in MODULES:
                yield module
            yield from (a.name for a in node.names if module in NAMES.get(a.name, ()))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in CALLS:
            yield ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield node.arg


def test_nothing_else_is_unpickled() -> None:
    files = [
        p for package in ("annotations", "customized_ops") for p in (ROOT / package).rglob("*.py")
    ]
    assert len(files) > 300
    found = {str(p.relative_to(ROOT)) for p in files if list(unpickling(p.read_text()))}
    assert found == KNOWN


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import joblib as j",
        "import torch\nplan = torch.load(path)",
        "from torch import load",
        "import numpy as np\nread = np.load",
        "read(path, allow_pickle=True)",
    ],
)
def test_unpickling_is_noticed(text: str) -> None:
    assert list(unpickling(text))
    assert not list(unpickling("import torch, json\njson.loads(text)\ntl.load(place)"))
