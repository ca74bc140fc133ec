"""pyproject.toml declares what users install; the wheel holds the two packages and nothing else."""

import re
import zipfile

import pytest
from wheels import PACKAGES, ROOT, build_wheel

tomllib = pytest.importorskip("tomllib", reason="tomllib needs Python 3.11")


@pytest.fixture(scope="module")
def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    """The file names in a wheel."""
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    assert wheel.name == "seqshard-0.1.0-py3-none-any.whl"
    return zipfile.ZipFile(wheel).namelist()


def requirement_name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement).group()


def test_project_metadata(pyproject):
    project = pyproject["project"]
    assert project["name"] == "seqshard"
    assert project["version"] == "0.1.0"
    assert project["requires-python"] == ">=3.10"
    assert project["dependencies"] == ["torch>=2.11", "numpy", "scipy", "tqdm"]


def test_build_needs_setuptools_alone(pyproject):
    assert list(map(requirement_name, pyproject["build-system"]["requires"])) == ["setuptools"]


def test_extras(pyproject):
    extras = pyproject["project"]["optional-dependencies"]
    assert {extra: list(map(requirement_name, needs)) for extra, needs in extras.items()} == {
        "flash": ["flash-attn-4"],
        "te": ["transformer-engine"],
        "cudnn": ["nvidia-cudnn-frontend", "nvidia-cutlass-dsl"],
        "fla": ["flash-linear-attention"],
        "hf": ["transformers"],
        "plot": ["matplotlib"],
        "docs": ["pdoc"],
        "test": [
            *("pytest", "pytest-xdist", "hypothesis", "matplotlib"),
            *("transformers", "accelerate", "pdoc", "ruff", "mypy"),
        ],
    }
    assert extras["te"] == ["transformer-engine[pytorch]>=2.15"]
    assert extras["hf"] == ["transformers>=5"]


def test_every_tool_is_pinned_and_only_in_constraints(pyproject):
    project = pyproject["project"]
    needed = {requirement_name(r) for r in project["dependencies"]}
    needed |= {requirement_name(r) for r in project["optional-dependencies"]["test"]}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.match(r"[\w.-]+==[\d.]+( ;|$)", pin) for pin in pins)
    assert {requirement_name(pin) for pin in pins} == needed
    for path in ("Makefile", ".ci/run", "pyproject.toml"):
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not re.search(r"==\s*\d", text), f"{path} pins a version"


def test_wheel_holds_all_sources_and_type_markers(wheel_names):
    for package in PACKAGES:
        sources = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / package).rglob("*.py")
            if "__pycache__" not in path.parts
        }
        assert sources
        assert sources <= set(wheel_names), "a folder without __init__.py is not a package"
        assert f"{package}/py.typed" in wheel_names


def test_wheel_holds_nothing_else(wheel_names):
    assert {name.split("/")[0] for name in wheel_names} == {*PACKAGES, "seqshard-0.1.0.dist-info"}
    assert "seqshard-0.1.0.dist-info/licenses/LICENSE" in wheel_names


def test_packages_are_typed():
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
