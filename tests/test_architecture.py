"""Which module may import which: no circles, and one direction between folders.

Every import statement counts, also one in a function and one under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("annotations", "customized_ops")
Graph = Mapping[str, set[str]]

RING = "customized_ops.ring_attention"
CORE = f"{RING}.core"
KERNEL_CORE = f"{CORE}.kernels"

# Of each folder of the core, the other folders of it that it may import.
CORE_FOLDERS = {
    "mask": set(),
    "layout": {"mask"},
    "plan": {"mask", "layout"},
    "merge": set(),
    "kernels": {"mask", "merge"},
    "comm": {"mask", "layout", "plan", "merge"},
    "run": {"mask", "layout", "plan", "merge", "kernels", "comm"},
}
# The same of the folders of kernels, which what lies beside them ("choice") may all import.
KERNEL_FOLDERS = {
    "protocol": set(),
    "window": {"protocol"},
    "adapters": {"protocol", "window"},
}


def files(root: Path) -> dict[str, Path]:
    """The modules of the packages, by name."""
    found = {}
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path) -> Graph:
    """Of each module of the packages, the modules that it imports, by full name; a package that is
    imported only because it holds one of these does not count."""
    modules = files(root)
    return {name: set(_imported(name, path, modules)) for name, path in modules.items()}


def _imported(name: str, path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield inner if inner in modules else module


def circle(graph: Graph) -> list[str]:
    """The modules of a circle of imports; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def inside(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def folder_of(module: str, package: str, folders: Iterable[str]) -> str:
    """Which of these folders of a package holds a module; empty if none does."""
    name = module.removeprefix(f"{package}.").split(".")[0] if inside(module, package) else ""
    return name if name in folders else ""


def is_public(module: str) -> bool:
    """Whether this is the package of the public ops, or one of its files."""
    return module == RING or (module.rpartition(".")[0] == RING and module not in (CORE, OP, API))


OP, API = f"{RING}.op", f"{RING}.api"


def allowed(importer: str, imported: str) -> bool:
    """Whether one module may import another, by the folders that they are in."""
    if inside(imported, "nnscaler"):
        return inside(importer, "annotations.engines.nnscaler")
    if inside(importer, "annotations"):
        return not inside(imported, "customized_ops")
    here, there = (folder_of(module, CORE, CORE_FOLDERS) for module in (importer, imported))
    if here and there and here != there:
        return there in CORE_FOLDERS[here]
    if here == there == "kernels":
        here, there = (folder_of(m, KERNEL_CORE, KERNEL_FOLDERS) for m in (importer, imported))
        return not here or here == there or there in KERNEL_FOLDERS[here]
    above_core = inside(imported, OP) or inside(imported, API) or is_public(imported)
    if inside(importer, CORE):
        return not above_core
    if inside(importer, OP):
        return not (inside(imported, API) or is_public(imported))
    return True


def wrong_arrows(graph: Graph) -> list[str]:
    return [
        f"{importer} -> {imported}"
        for importer, each in sorted(graph.items())
        for imported in sorted(each)
        if not allowed(importer, imported)
    ]


def test_no_circle() -> None:
    assert circle(imports(ROOT)) == []


def test_imports_go_one_way() -> None:
    assert wrong_arrows(imports(ROOT)) == []


def test_every_folder_of_the_core_has_its_rule() -> None:
    folders = {path.parent.name for path in (ROOT / CORE.replace(".", "/")).glob("*/__init__.py")}
    assert folders == set(CORE_FOLDERS)


def planted(root: Path, sources: Mapping[str, str]) -> Graph:
    """The imports of a tree of modules."""
    for name, source in sources.items():
        path = root / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return imports(root)


@pytest.mark.parametrize(
    "back",
    [
        "from .a import x",
        "from . import a",
        "import annotations.a",
        "from annotations import a",
        "def f():\n    from .a import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import x",
    ],
)
def test_a_circle_is_noticed(tmp_path: Path, back: str) -> None:
    sources = {"annotations.__init__": "", "annotations.a": "from .b import y"}
    assert circle(planted(tmp_path, {**sources, "annotations.b": "y = 1"})) == []
    found = circle(planted(tmp_path, {**sources, "annotations.b": back}))
    assert set(found) == {"annotations.a", "annotations.b"}


def test_a_circle_through_a_package_is_noticed(tmp_path: Path) -> None:
    sources = {"annotations.__init__": "from .a import x", "annotations.a": "from . import y"}
    assert set(circle(planted(tmp_path, sources))) == {"annotations", "annotations.a"}


@pytest.mark.parametrize(
    ("importer", "line"),
    [
        ("annotations.rules", "from customized_ops.ring_attention import Layout"),
        ("annotations.parallel", "def f():\n    import nnscaler.policies"),
        (f"{RING}.ring_attn", "import nnscaler"),
        (f"{CORE}.mask.slices", "from ..layout import Layout"),
        (f"{CORE}.plan.plan", "from ..run import executor"),
        (f"{CORE}.merge.merge", "from ..plan import Plan"),
        (f"{CORE}.kernels.choice", "from ..comm import Comm"),
        (f"{KERNEL_CORE}.adapters.flash4", "from ..choice import KERNELS"),
        (f"{KERNEL_CORE}.window.windowed", "from ..adapters import flash4"),
        (f"{CORE}.comm.messages", "from ..run.executor import forward"),
        (f"{CORE}.run.executor", "from ...op.call import AttentionCall"),
        (f"{CORE}.report.draw", f"from {RING}.doctor import main"),
        (f"{OP}.eager", "from ..ring_attn import wrap_ring_attn_func"),
        (f"{OP}.eager", "from .. import ring_attn"),
        (f"{OP}.eager", "from ..api.yunchang import attention"),
    ],
)
def test_a_wrong_arrow_is_noticed(tmp_path: Path, importer: str, line: str) -> None:
    (found,) = wrong_arrows(planted(tmp_path, {importer: line}))
    assert found.startswith(f"{importer} -> ")


def test_right_arrows_are_not_refused(tmp_path: Path) -> None:
    sources = {
        "annotations.engines.nnscaler.node": "import nnscaler",
        f"{RING}.ring_attn": "from .op.eager import attend\nfrom .core.mask import AttnMask",
        f"{API}.yunchang": "from ..ring_attn import wrap_ring_attn_func",
        f"{OP}.eager": "from ..core.run.executor import forward\nfrom annotations import rules",
        f"{CORE}.run.executor": "from ..plan import Plan\nfrom ..kernels.choice import choose",
        f"{KERNEL_CORE}.choice": "from .adapters import flash4\nfrom .speeds import seconds",
        f"{KERNEL_CORE}.adapters.flash4": "from ..window import windowed",
        f"{CORE}.plan.plan": "from .work import Work\nfrom ..mask.slices import Slice",
    }
    assert wrong_arrows(planted(tmp_path, sources)) == []
