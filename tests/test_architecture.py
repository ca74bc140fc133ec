"""Which module may import which: no circles, and one direction between folders. How long a file may
be, and how many a folder may hold.

Every import statement counts, also one in a function and one under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest
from import_graph import PACKAGES, ROOT, Graph, circle, imports, nodes

RING = "customized_ops.ring_attention"
CORE = f"{RING}.core"
ENGINES = "annotations.engines"

# Of each folder (or file) of a package, the others of it that it may import. "" are all other files
# of the package itself.
FOLDERS: Mapping[str, Mapping[str, set[str]]] = {
    CORE: {
        "mask": set(),
        "layout": {"mask"},
        "plan": {"mask", "layout"},
        "tape": set(),
        "merge": {"tape"},
        "kernels": {"mask", "merge", "tape"},
        "comm": {"mask", "layout", "plan", "merge", "tape"},
        "run": {"mask", "layout", "plan", "merge", "kernels", "comm", "tape"},
    },
    f"{CORE}.layout": {
        "layout_arguments": set(),
        "layout_tables": {"layout_arguments"},
        "documents": {"layout_tables"},
        "": {"documents", "layout_tables", "layout_arguments"},
    },
    f"{CORE}.kernels": {
        "protocol": set(),
        "window": {"protocol"},
        "adapters": {"protocol", "window"},
        "": {"protocol", "window", "adapters"},
    },
    "annotations": {
        "": set(),
        "library": {""},
        "codegen": {""},
        "engines": {"", "library", "codegen"},
    },
    ENGINES: {
        "": set(),
        "nnscaler": {""},
        "torch": {""},
    },
    f"{ENGINES}.torch": {
        "": set(),
        "capture": set(),
        "strategies": {"", "capture"},
        "permute": {"", "capture", "strategies"},
        "plan": {"", "capture", "strategies", "permute"},
        "run": {"", "capture", "strategies"},
        "module": {"", "capture", "strategies", "permute", "plan", "run"},
    },
}
# They gather what users import, or pick an engine, and nothing below them imports them.
ABOVE_THEIR_FOLDERS = {
    "annotations",
    "annotations.parallel",
    f"{ENGINES}.torch",
    f"{ENGINES}.torch.__main__",
}


def inside(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def folder_in(package: str, module: str) -> str | None:
    """The folder of a package that holds a module, as :data:`FOLDERS` names it; None if no rule is
    about it."""
    if not inside(module, package):
        return None
    name = module.removeprefix(package).removeprefix(".").split(".")[0]
    return next((folder for folder in (name, "") if folder in FOLDERS[package]), None)


def goes_down(package: str, importer: str, imported: str) -> bool:
    """Whether an import goes from a folder of a package only to those that it may import."""
    here, there = folder_in(package, importer), folder_in(package, imported)
    return None in (here, there) or here == there or there in FOLDERS[package][here]


def is_above_ops(module: str) -> bool:
    """Whether this is the package of the public ops, one of its files, or in a folder (but for the
    core and the ops' own), which all build on these."""
    return inside(module, RING) and not (inside(module, CORE) or inside(module, OP))


OP = f"{RING}.op"
FUZZ, API = f"{RING}.fuzz", f"{RING}.api"


def allowed(importer: str, imported: str) -> bool:
    """Whether one module may import another, by the folders that they are in."""
    if inside(imported, "nnscaler"):
        return inside(importer, "annotations.engines.nnscaler")
    if inside(importer, "annotations"):
        if inside(imported, "customized_ops"):
            return False
        if importer in ABOVE_THEIR_FOLDERS:
            return True
        if imported in ABOVE_THEIR_FOLDERS:
            return False
    if not all(goes_down(package, importer, imported) for package in FOLDERS):
        return False
    if inside(imported, FUZZ) and not inside(importer, FUZZ):
        return importer == f"{RING}.__main__"
    if inside(importer, RING) and inside(imported, "customized_ops") and not inside(imported, RING):
        return inside(importer, FUZZ) or inside(importer, API)  # others' ops build on these
    if inside(importer, CORE):
        return not (inside(imported, OP) or is_above_ops(imported))
    return not (inside(importer, OP) and is_above_ops(imported))


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


@pytest.mark.parametrize("package", FOLDERS)
def test_every_folder_has_its_rule(package: str) -> None:
    files_of = ROOT / package.replace(".", "/")
    folders = {path.parent.name for path in files_of.glob("*/__init__.py")}
    ruled = set(FOLDERS[package]) - {""}
    assert folders <= ruled <= folders | {path.stem for path in files_of.glob("*.py")}


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
        ("annotations.grammar", "from .engines.config import ComputeConfig"),
        ("annotations.library.define", "from ..codegen import constants"),
        ("annotations.registry", "from . import parallelize"),
        ("annotations.codegen.constants", "from ..engines.config import ComputeConfig"),
        (f"{ENGINES}.config", "from .torch.rates import Rates"),
        (f"{ENGINES}.torch.plan.planning", "from ...nnscaler import op_node"),
        (f"{ENGINES}.torch.rates", "from .plan.meshes import mesh_of_copies"),
        (f"{ENGINES}.torch.plan.planning", "from .. import Rates"),
        (f"{ENGINES}.torch.capture.losses", "from ..permute.token_axes import along"),
        (f"{ENGINES}.torch.permute.choice", "from ..plan.engine_cost import PlanCost"),
        (f"{ENGINES}.torch.run.execute", "from ..module import parameters"),
        (f"{RING}.ring_attn", "import nnscaler"),
        (f"{CORE}.mask.slices", "from ..layout import Layout"),
        (f"{CORE}.layout.documents.subtrees", "from ..balance import assign"),
        (f"{CORE}.plan.plan", "from ..run import executor"),
        (f"{CORE}.merge.merge", "from ..plan import Plan"),
        (f"{CORE}.kernels.choice", "from ..comm import Comm"),
        (f"{CORE}.kernels.adapters.flash4", "from ..choice import KERNELS"),
        (f"{CORE}.kernels.window.windowed", "from ..adapters import flash4"),
        (f"{CORE}.comm.messages", "from ..run.executor import forward"),
        (f"{CORE}.run.executor", "from ...op.call import AttentionCall"),
        (f"{CORE}.report.draw", f"from {RING}.command_line import doctor"),
        (f"{OP}.eager", "from ..ring_attn import wrap_ring_attn_func"),
        (f"{OP}.eager", "from .. import ring_attn"),
        (f"{RING}.ring_attn", "from ..linear_attention import wrap_gated_delta_rule_func"),
        (f"{RING}.probes.check", "from ..fuzz import Trial"),
        (f"{OP}.eager", "from ..api.yunchang import attention"),
    ],
)
def test_a_wrong_arrow_is_noticed(tmp_path: Path, importer: str, line: str) -> None:
    (found,) = wrong_arrows(planted(tmp_path, {importer: line}))
    assert found.startswith(f"{importer} -> ")


def test_right_arrows_are_not_refused(tmp_path: Path) -> None:
    sources = {
        "annotations.__init__": "from .parallel import parallelize",
        f"{ENGINES}.nnscaler.node": "import nnscaler\nfrom annotations.codegen import constants",
        f"{ENGINES}.torch.__init__": "from .plan.planning import plan",
        f"{ENGINES}.torch.plan.planning": "from ..rates import Rates\nfrom ...config import x",
        f"{RING}.ring_attn": "from .op.eager import attend\nfrom .core.mask import AttnMask",
        f"{RING}.api.yunchang": "from ..ring_attn import wrap_ring_attn_func",
        f"{FUZZ}.kinds.loss": "from ....chunk_linear_cross_entropy import loss",
        f"{OP}.eager": "from ..core.run.executor import forward\nfrom annotations import rules",
        f"{CORE}.run.executor": "from ..plan import Plan\nfrom ..kernels.choice import choose",
        f"{CORE}.kernels.choice": "from .adapters import flash4\nfrom .speeds import seconds",
        f"{CORE}.kernels.adapters.flash4": "from ..window import windowed",
        f"{CORE}.plan.plan": "from .work import Work\nfrom ..mask.slices import Slice",
    }
    assert wrong_arrows(planted(tmp_path, sources)) == []


def test_tests_on_nnscaler_import_what_is_there() -> None:
    """Nothing else sees it where nnscaler is not installed: they are not even collected."""
    here = ROOT / "tests" / "on_nnscaler"
    files, missing = sorted(here.rglob("*.py")), []
    for file in files:
        for node in nodes(file.read_text()):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("on_nnscaler"):
                folder = here.parent / str(node.module).replace(".", "/")
                names = [n.name for n in node.names] if folder.is_dir() else [""]
                at = [(folder / f"{n}.py") if n else folder.with_suffix(".py") for n in names]
                missing += [f"{file.name}: {path.name}" for path in at if not path.exists()]
    assert len(files) > 30 and not missing


MOST_LINES, MOST_FILES = 300, 12
FULLER = {
    "annotations",  # modules that users and engines import by these names
    RING.replace(".", "/"),  # the same: most have nnscaler's names
    f"{RING.replace('.', '/')}/docs",  # pages link to one another, and packages include them
}


def sizes(root: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Of the sources, examples and tests, the lines of each module and the files of each folder."""
    lines, files = dict[str, int](), dict[str, int]()
    for path in sorted(
        each for top in (*PACKAGES, "examples", "tests") for each in (root / top).rglob("*")
    ):
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        name, folder = (each.relative_to(root).as_posix() for each in (path, path.parent))
        files[folder] = files.get(folder, 0) + 1
        if path.suffix == ".py":
            lines[name] = len(path.read_text(encoding="utf-8").splitlines())
    return lines, files


def test_modules_are_short_and_folders_hold_few_files() -> None:
    lines, files = sizes(ROOT)
    assert len(lines) > 800
    assert not {name for name, count in lines.items() if count > MOST_LINES}
    assert {name for name, count in files.items() if count > MOST_FILES} == FULLER


def test_what_is_long_or_full_is_noticed(tmp_path: Path) -> None:
    planted(tmp_path, {"annotations.long": "\n" * 301, "tests.short": "\n" * 300})
    planted(tmp_path, {f"examples.many.m{n}": "" for n in range(13)})
    lines, files = sizes(tmp_path)
    assert [name for name in lines if lines[name] > MOST_LINES] == ["annotations/long.py"]
    assert [name for name in files if files[name] > MOST_FILES] == ["examples/many"]
