"""Every public name of nnscaler's own ring attention beside ours: the same functions with the same
arguments, in their order and with their defaults. What is left out on purpose is listed here.

nnscaler's files are read, not imported: they need flash_attn. They are those that
``NNSCALER_SOURCE`` names, or of the installed package.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nnscaler

FOLDER = "customized_ops/ring_attention"
OURS = "customized_ops.ring_attention"

# What nnscaler's registration calls; ours is annotations.engines.nnscaler.
REGISTRATION = {"emit_ring", "emit_zigzag", "input_gen_fn", "maybe_anno"}

# By module, what we have no use for.
LEFT_OUT = {
    # They say whether ENABLE_TE_CP is set, and can be met. Here kernel="te_cp" asks for it.
    "ring_attn_varlen": {
        "attn_forward_func_with_cp",
        "get_transformer_engine_info",
        "print_transformer_engine_status",
    },
}


def source() -> Path:
    if "NNSCALER_SOURCE" in os.environ:
        return Path(os.environ["NNSCALER_SOURCE"]) / "nnscaler" / FOLDER
    spec = importlib.util.find_spec("nnscaler")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / FOLDER


def modules() -> list[str]:
    """All but the implementations below them, in ``core``."""
    return sorted(path.stem for path in source().glob("*.py"))


def public(text: str, exports: bool = False) -> dict[str, ast.arguments | None]:
    """Functions with their arguments; classes and constants; what an ``__init__`` exports."""
    found: dict[str, ast.arguments | None] = {}
    for node in ast.parse(text).body:
        match node:
            case ast.FunctionDef(name=name):
                found[name] = node.args
            case ast.ClassDef(name=name):
                found[name] = None
            case ast.Assign(targets=[ast.Name(id=name)]):
                found[name] = None
            case ast.ImportFrom(level=1) if exports:
                found |= {alias.asname or alias.name: None for alias in node.names}
    return {name: arguments for name, arguments in found.items() if not name.startswith("_")}


def arguments_of(given: ast.arguments) -> list[tuple[str, Any]]:
    """Names and defaults in order; ``inspect.Parameter.empty`` for no default."""
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    defaults = [ast.literal_eval(default) for default in given.defaults]
    missing = len(names) - len(defaults)
    return list(zip(names, [inspect.Parameter.empty] * missing + defaults, strict=True))


def differences(theirs: ast.arguments, ours: Any) -> list[str]:
    """Ours may have more arguments behind theirs, defaults where they have none, and ``*args,
    **kwargs``, which take all."""
    here = list(inspect.signature(ours).parameters.values())
    takes_any = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    found = []
    for n, (name, default) in enumerate(arguments_of(theirs)):
        if takes_any == {parameter.kind for parameter in here[n:]}:
            break
        if n >= len(here) or here[n].name != name or here[n].kind is inspect.Parameter.KEYWORD_ONLY:
            found.append(
                f"argument {n} is {name}, ours {here[n].name if n < len(here) else 'missing'}"
            )
        elif default not in (inspect.Parameter.empty, here[n].default):
            found.append(f"{name} is {default!r} by default, ours {here[n].default!r}")
    for more in here[len(arguments_of(theirs)) :]:
        if more.kind not in takes_any and more.default is inspect.Parameter.empty:
            found.append(f"ours needs {more.name}")
    return found


@pytest.mark.parametrize("module", modules())
def test_every_name_is_here(module: str) -> None:
    ours = importlib.import_module(OURS if module == "__init__" else f"{OURS}.{module}")
    wanted = public((source() / f"{module}.py").read_text(), exports=module == "__init__")
    lacking = {name for name in wanted if not hasattr(ours, name)}
    assert lacking - REGISTRATION == LEFT_OUT.get(module, set())
    for name, arguments in wanted.items():
        if name not in lacking and arguments is not None:
            assert not differences(arguments, getattr(ours, name)), f"{module}.{name}"


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        ("a, b=1, c=(2, 3)", []),
        ("a", []),
        ("a, b, c", []),
        ("a, c, b", ["argument 1 is c, ours b", "argument 2 is b, ours c"]),
        ("a, b=True, c=(2, 4)", ["c is (2, 4) by default, ours (2, 3)"]),
        ("a, b=1, c=(2, 3), d=None", ["argument 3 is d, ours e"]),
        ("", ["ours needs a"]),
    ],
)
def test_what_differs_is_found(theirs: str, difference: list[str]) -> None:
    def ours(a: Any, b: int = 1, c: Any = (2, 3), *, e: int = 0) -> None: ...

    (arguments,) = public(f"def f({theirs}): ...\nx = _y = 1\ndef _g(): ...").values()
    assert arguments is not None
    assert differences(arguments, ours) == difference
