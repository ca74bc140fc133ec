"""What flash-attn-4's kernel can do, and what an installation may lack."""

import sys

import pytest
import torch
from flash4_library import Library, install

from customized_ops.ring_attention.core.kernels import Request
from customized_ops.ring_attention.core.kernels.adapters import flash4
from customized_ops.ring_attention.core.kernels.adapters.flash4_parts import flash4_choice

from .flash4_cases import WAYS, check, draw, pairs_of


def test_every_argument_is_probed(library, monkeypatch):
    monkeypatch.setattr(flash4_choice, *WAYS["blocks"])
    for kind in ("documents", "streaming"):
        pairs = pairs_of(kind)
        check(pairs, *draw(pairs))
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        used = set().union(*(given for called, given in library.calls if called == name))
        assert used == set(flash4.NEEDS[f"flash_attn.cute.interface.{name}"])


def test_nothing_is_missing(library):
    assert flash4.missing() is None


def test_missing_names_what_the_installed_version_lacks(monkeypatch):
    interface = install(monkeypatch, Library())
    monkeypatch.setattr(interface, "_flash_attn_bwd", lambda q, k, v: None)
    reason = flash4.missing.__wrapped__()
    assert "_flash_attn_bwd takes no out, dout" in reason and "dlse" in reason


def test_missing_names_what_block_lists_need(monkeypatch):
    install(monkeypatch, Library())
    monkeypatch.delattr(sys.modules["flash_attn.cute.utils"], "scalar_to_ssa")
    reason = flash4.missing.__wrapped__()
    assert reason == "flash_attn.cute.utils has no scalar_to_ssa; that of 4.0.0b36 does"


def test_missing_says_what_to_install(monkeypatch):
    monkeypatch.setattr(flash4.importlib.util, "find_spec", lambda name: None)
    reason = flash4.missing.__wrapped__()
    assert reason == "flash_attn.cute is not installed; pip install --pre flash-attn-4"


def test_a_broken_installation_is_missing(monkeypatch):
    install(monkeypatch, Library())
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    with pytest.warns(UserWarning, match="does not import .* Slower kernels take its place"):
        reason = flash4.missing.__wrapped__()
    assert "does not import" in reason


def request(d=128, e=None, *features, dtype=torch.bfloat16, heads=(8, 2)):
    device = torch.device("cuda")
    return Request(device, dtype, d, d if e is None else e, *heads, features=features)


# capability of the GPU, request, what the refusal says or None
REQUESTS = {
    "plain": ((9, 0), request(), None),
    "fp16": ((9, 0), request(dtype=torch.float16), None),
    "all it has": ((9, 0), request(128, 128, "softcap", "lse gradient", "deterministic"), None),
    "256": ((9, 0), request(256, 256, "softcap", "lse gradient"), None),
    "192 and 128": ((9, 0), request(192, 128, heads=(8, 8)), None),
    "192 and 128, grouped": ((9, 0), request(192, 128), None),
    "other widths": ((9, 0), request(128, 64, heads=(8, 8)), None),
    "odd": ((9, 0), request(68), "multiples of 8"),
    "wide": ((9, 0), request(512), "up to 256 and 256"),
    "fp32": ((9, 0), request(dtype=torch.float32), "not torch.float32"),
    "alibi": ((9, 0), request(128, 128, "alibi"), "has no alibi"),
    "old GPU": ((8, 0), request(), "needs compute capability 9.0"),
    "Blackwell": ((10, 0), request(), None),
    "Blackwell, 192 and 128": ((10, 0), request(192, 128, heads=(8, 8)), None),
    "Blackwell, 192 and 128, grouped": ((10, 0), request(192, 128), "up to 128, 192 and 128"),
    "Blackwell, other widths": ((10, 0), request(128, 64), None),
    "Blackwell, 192": ((10, 0), request(192), "up to 128, 192 and 128, or 256"),
    "Blackwell, 256": ((10, 0), request(256), None),
    "Blackwell, 256, softcap": ((10, 0), request(256, 256, "softcap"), "no softcap for head dim"),
    "desktop Blackwell": ((12, 0), request(), "not made for compute capability 12"),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_capabilities(monkeypatch, case):
    capability, asked, reason = REQUESTS[case]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    refusal = flash4.CAPABILITIES[0].refuses(asked)
    assert refusal is None if reason is None else reason in refusal
