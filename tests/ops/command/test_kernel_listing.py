"""The command that lists kernels."""

import pytest
import torch

from customized_ops.ring_attention.__main__ import main
from customized_ops.ring_attention.command_line.kernel_listing import DISTRIBUTIONS, listing
from customized_ops.ring_attention.core.kernels import KERNELS
from customized_ops.ring_attention.core.kernels.adapters import flex
from customized_ops.ring_attention.core.kernels.speeds import SHAPE_CLASSES


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_lists_kernels(capsys):
    main(["kernels"])
    above, below, by_name = capsys.readouterr().out.split("\n\n")
    assert by_name.endswith(": te_cp, te_cp:all_gather, te_cp:a2a\n")
    lines = above.splitlines()
    assert lines[0].split()[:3] == ["kernel", "version", "here"]
    # A further device of a kernel has a line without a name.
    names = [line.split()[0] for line in lines[1:] if line[0] not in " ["]
    assert names == list(KERNELS) and set(names) <= set(DISTRIBUTIONS)
    (flex_line,) = (line for line in lines if line.startswith("flex"))
    assert f"torch {torch.__version__.partition('+')[0]}" in flex_line
    assert "  no [1]  " in flex_line and "up to 256  " in flex_line
    assert lines[-1] == "[1] no CUDA device"
    (torch_line,) = (line for line in lines if line.startswith("torch"))
    assert "  yes  " in torch_line
    title, header, *taken = below.splitlines()
    assert title == "For training on cpu in bf16, 32 query and 8 key heads of dim 128:"
    assert header.split() == ["auto", "takes", "2K", "tokens", "8K", "tokens", "32K", "tokens"]
    assert [line.split() for line in taken] == [[name, *["torch"] * 3] for name in SHAPE_CLASSES]


@pytest.mark.usefixtures("no_gpu")
def test_lists_kernels_without_asking_those_for_gpus(monkeypatch):
    def asked():
        raise AssertionError("a kernel for GPUs was asked on a machine without one")

    monkeypatch.setattr(flex, "missing", asked)
    listing(torch.device("cpu"))


def test_lists_what_keeps_a_kernel_from_running(monkeypatch):
    """As on a GPU, without one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name, kernel in KERNELS.items():
        if name not in ("torch", "reference"):
            monkeypatch.setattr(kernel, "missing", lambda: "lacks a library")
    above, below = listing(torch.device("cuda")).split("\n\n")
    (line,) = (line for line in above.splitlines() if line.startswith("flex"))
    assert "  no [1]  cuda from 8.0  bfloat16, float16, float32  " in line
    assert above.splitlines()[-1] == "[1] lacks a library"
    title = below.splitlines()[0]
    assert "on cuda" in title and title.endswith(", by figures measured on an H200:")


def test_listing_kernels_takes_no_arguments(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["kernels", "--tokens", "4"])
    assert exit_.value.code == 2
    assert "unrecognized arguments: --tokens 4" in capsys.readouterr().err
