"""A plain install beside a user's own folder ``customized_ops``, which has no ``__init__.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import install

MINE = "def chunk_linear_cross_entropy(x, w, y, padding_idx, chunk_size): ..."


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project: his script is to be ``train.py``."""
    own = tmp_path / "customized_ops"
    (own / "ring_attention").mkdir(parents=True)
    (own / "group").mkdir()
    (own / "chunk_linear_cross_entropy" / "__pycache__").mkdir(parents=True)  # a rest of one
    (own / "extra.py").write_text("answer = 42")
    (own / "group" / "inner.py").write_text("answer = 43")
    (own / "ring_attention" / "__init__.py").write_text("raise AssertionError('not this one')")
    return tmp_path


def run(installed: Path, project: Path, *arguments: str, script: str) -> str:
    """What a script prints, in the project's folder; ``arguments`` are Python's own."""
    (project / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, *arguments, "train.py"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LOSS = (
    "from customized_ops.chunk_linear_cross_entropy import chunk_linear_cross_entropy as f\n"
    "print(f.__module__)\n"
)


COMMAND_LINE = (
    "import runpy\n"
    "sys.argv = ['as of python -m', '--help']\n"
    "runpy.run_module('customized_ops.ring_attention', run_name='__main__', alter_sys=True)\n"
)


def test_both_are_found_and_no_other_copy_of_this_package(installed: Path, project: Path) -> None:
    """And the command line starts; all of it where warnings are errors."""
    other = project / "copy" / "customized_ops" / "chunk_linear_cross_entropy"
    other.mkdir(parents=True)
    (other.parent / "__init__.py").write_text("")
    (other / "__init__.py").write_text("raise AssertionError('of another copy')")
    out = run(
        installed,
        project,
        "-W",
        "error",
        script="import sys, customized_ops\n"
        "sys.path.insert(0, 'copy')\n"
        "import customized_ops.extra, customized_ops.group.inner\n"
        "import customized_ops.ring_attention as ring\n"
        "print(customized_ops.extra.answer, customized_ops.group.inner.answer)\n"
        "print(ring.__file__, ring.wrap_ring_attn_func.__module__)\n"
        f"{LOSS}print(sys.modules[f.__module__].__file__)\n{COMMAND_LINE}",
    )
    package = installed / "customized_ops"
    said, usage = out.splitlines()[:4], out.splitlines()[4]
    assert usage.startswith("usage: ")
    assert said == [
        "42 43",
        f"{package / 'ring_attention' / '__init__.py'} customized_ops.ring_attention.ring_attn",
        "customized_ops.chunk_linear_cross_entropy.loss",
        str(package / "chunk_linear_cross_entropy" / "loss.py"),
    ]


def test_a_module_of_the_users_own_comes_first(installed: Path, project: Path) -> None:
    (project / "customized_ops" / "chunk_linear_cross_entropy.py").write_text(MINE)
    assert run(installed, project, script=LOSS) == "customized_ops.chunk_linear_cross_entropy\n"


@pytest.mark.slow
def test_values_pickle(installed: Path, project: Path) -> None:
    out = run(
        installed,
        project,
        script="import pickle\n"
        "from customized_ops.ring_attention import Layout, wrap_ring_attn_func\n"
        "both = Layout.zigzag(8, 2), wrap_ring_attn_func\n"
        "print(pickle.loads(pickle.dumps(both)) == both)\n",
    )
    assert out == "True\n"
