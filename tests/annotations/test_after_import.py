"""An engine is imported with the package that it works with, whichever of the two comes first; and
the compiler only where a program imports it."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from annotations import after_import
from annotations.after_import import import_with

PACKAGE, ENGINE = "imported_package", "engine_of_it"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").write_text("value = 1")
    (tmp_path / f"{ENGINE}.py").write_text(f"from {PACKAGE} import value")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(after_import, "_asked", set())
    yield tmp_path
    for name in (PACKAGE, ENGINE):
        sys.modules.pop(name, None)


def test_after_the_package(folder: Path) -> None:
    importlib.import_module(PACKAGE)
    import_with(PACKAGE, ENGINE)
    assert ENGINE in sys.modules


def test_before_the_package(folder: Path) -> None:
    finders = len(sys.meta_path)
    import_with(PACKAGE, ENGINE)
    import_with(PACKAGE, ENGINE)
    assert len(sys.meta_path) == finders + 1
    assert importlib.util.find_spec(PACKAGE) is not None  # looking for it imports nothing
    assert ENGINE not in sys.modules
    module = importlib.import_module(PACKAGE)
    assert ENGINE in sys.modules and module.value == 1
    assert module.__file__ == str(folder / PACKAGE / "__init__.py")


def test_a_package_that_is_missing(folder: Path) -> None:
    import_with("no_such_package", ENGINE)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_package")
    assert ENGINE not in sys.modules


@pytest.mark.parametrize("order", ["before", "after"])
def test_an_engine_that_fails(folder: Path, order: str) -> None:
    (folder / f"{ENGINE}.py").write_text("1 / 0")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if order == "before":
            importlib.import_module(PACKAGE)
        import_with(PACKAGE, ENGINE)
        import_with(PACKAGE, ENGINE)
        importlib.import_module(PACKAGE)
    (warning,) = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert warning == (
        f"{PACKAGE} does not know the functions of this package, and would trace into them: "
        f"import {ENGINE} fails with ZeroDivisionError: division by zero"
    )


UNCOMPILED = """
import sys
import torch
from customized_ops.ring_attention import AttnMask, Layout, make_plan
assert "torch._dynamo" not in sys.modules, "imported with the package"
from annotations.groups import name_of_ranks

def planned(x):
    mask = AttnMask.causal(8)
    plan = make_plan(mask, Layout.contiguous(8, 2))
    return x * plan.group_size * mask.area

compiled = torch.compile(planned, backend="eager")
assert name_of_ranks._dynamo_marked_constant
if not torch.__version__.startswith("2.11"):  # which cannot hold arrays that are only read
    assert float(compiled(torch.ones(()))) == 2 * 36
torch.compiler.reset()
try:
    torch.compile(planned, backend="eager", fullgraph=True)(torch.ones(()))
except Exception as error:
    assert "masks, layouts and plans are numpy's" in str(error), error
else:
    raise AssertionError("planning is part of the graph")
"""


def test_the_compiler_is_told_what_to_leave_alone_once_it_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", UNCOMPILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
