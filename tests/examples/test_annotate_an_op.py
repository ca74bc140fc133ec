"""The example on its own processes, and that its op is a norm like torch's."""

from __future__ import annotations

import re
import sys

import annotate_an_op
import pytest
import torch
import torch.nn.functional as F
from dense import assert_same
from example_runs import run
from own_ops import group_norm

FROZEN = """\
group_norm: 'c' cannot be split
    b l g c^, g c^ -> b l g c^
          ^~
    it is marked frozen: 'c^'
    can be split over 2 ranks: 'l', 'g'
    asked for by policy 'channels' for group_norm in the module

plan: 2 ranks a copy, copies of the model: 1
"""


@pytest.mark.slow
def test_what_it_shows() -> None:
    done = run("annotate_an_op.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(FROZEN)
    assert re.search(r"^group_norm +1 +l / 2 +sums +\d+ B", done.stdout, re.MULTILINE)
    shown = re.search(r"one process: loss (\S+), gradients (\S+)$", done.stdout.rstrip())
    assert shown is not None, done.stdout
    assert all(float(difference) < 1e-13 for difference in shown.groups())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it does without CUDA")
def test_nnscaler_needs_cuda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["annotate_an_op.py", "--engine", "nnscaler"])
    with pytest.raises(SystemExit) as ended:
        annotate_an_op.parse()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "error: --engine nnscaler needs CUDA, which is not available here" in said


def test_the_op_is_group_norm() -> None:
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    gain = torch.randn(3, 4, dtype=torch.float64)
    plain = F.group_norm(x.flatten(2).transpose(1, 2), 3, gain.flatten(), eps=1e-5)
    got = group_norm.group_norm(x, gain)
    assert_same("group_norm", got.flatten(2).transpose(1, 2), plain)


def test_gradients() -> None:
    x = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    gain = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(group_norm.group_norm, (x, gain))
