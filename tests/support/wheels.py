"""The package as users install it: a wheel, and a folder that pip installs it into."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("annotations", "customized_ops")

_OFF_LINE = ["--no-deps", "--no-index", "--disable-pip-version-check"]


def build_wheel(folder: Path) -> Path:
    """A wheel made in ``folder``, off line, from a copy of the sources."""
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools>=77")
    source, wheels = folder / "source", folder / "wheels"
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.egg-info")
    source.mkdir()
    for path in ROOT.iterdir():
        if path.name in {*PACKAGES, "tests", "examples"}:
            shutil.copytree(path, source / path.name, ignore=ignored)
        elif path.suffix in {".toml", ".md"} or path.name == "LICENSE":
            shutil.copy(path, source)
    _pip("wheel", "--no-build-isolation", "--wheel-dir", wheels, source)
    (wheel,) = wheels.iterdir()
    return wheel


def install(folder: Path) -> Path:
    """A folder inside ``folder`` that has the package installed, to be put on Python's path."""
    target = folder / "installed"
    _pip("install", "--target", target, build_wheel(folder))
    return target


def _pip(command: str, *arguments: Any) -> None:
    pytest.importorskip("pip", reason="building needs pip")
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, *_OFF_LINE, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
