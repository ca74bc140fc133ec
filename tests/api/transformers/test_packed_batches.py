"""Packed batches of Hugging Face models: planned ahead, and read once at most."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from packed_jobs import counted
from refusals import refusals
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

from hf_models import tiny

from customized_ops.ring_attention import Layout, PackedBatch, packed_batches, run_ranks
from customized_ops.ring_attention.api import transformers as seqshard
from customized_ops.ring_attention.api.transformers.mask_function import MaskDescription


class NoReads(TorchDispatchMode):
    """Refuses what a GPU would be waited for: a number or a truth that is read from a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "read from a tensor"
        return func(*args, **(kwargs or {}))


def forwards(
    batches: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Tensor]]:
    """A model's loss of what each rank's shard_batch is given, with its layout; and the tensors
    among the inputs, there and in its forward, that were copied to the host."""
    model, copied, to_host = tiny("llama").eval(), list[Tensor](), Tensor.cpu

    def rank(comm: Any) -> tuple[Tensor, list[Tensor]]:
        mine = copy.deepcopy(model)
        mine.set_attn_implementation("seqshard")
        given, layout = batches[comm.rank]
        shard = seqshard.shard_batch(given, comm, layout)
        with shard.context(), NoReads():
            loss = mine(**shard.inputs).loss.detach()
        named = vars(given) if isinstance(given, PackedBatch) else given
        on_device = [t for t in (*named.values(), *shard.inputs.values()) if isinstance(t, Tensor)]
        return loss, [t for t in on_device if t is not named.get("cu_seqlens")]

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "cpu", lambda t: copied.append(t) or to_host(t))
        losses, inputs = zip(*run_ranks(2, rank), strict=True)
    places = {t.data_ptr() for each in inputs for t in each}
    return list(losses), [t for t in copied if t.data_ptr() in places]


DOCUMENTS = [[5, 9, 2, 7, 3], [4] * 9, [1, 2, 3], [8]]
AHEAD: Any = {"ranks": 2, "heads": (4, 2), "head_dim": 8}


@pytest.mark.parametrize("whole", [False, True])
def test_a_loader_plans_ahead(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it gives is cut, and attention finds the plan; losses are those of each document.
    Position ids are not read: they are known from the lengths."""
    model, losses = tiny("llama").eval(), []
    made = [next(packed_batches([DOCUMENTS], rank=n, whole=whole, **AHEAD)) for n in range(2)]
    with counted() as counts:
        found, copied = forwards([(batch, None) for batch in made], monkeypatch)
    assert counts["plans"] == 0 and not copied
    for each in DOCUMENTS[:3]:
        ids = torch.tensor([each])
        losses.append(model(input_ids=ids, labels=ids).loss * (len(each) - 1))
    expected = sum(losses).item() / made[0].target_count
    assert sum(found).item() == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("told", ["position_ids", "cu_seq_lens_q", "both", "nothing"])
def test_position_ids_are_read_once_at_most(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all where lengths are given in their place."""
    made = next(packed_batches([DOCUMENTS], rank=0, whole=True, **AHEAD))
    given = {"input_ids": made.tokens[None], "labels": made.targets.clamp(min=0)[None]}
    if told in ("position_ids", "both"):
        given["position_ids"] = made.positions[None]
    if told in ("cu_seq_lens_q", "both"):
        given["cu_seq_lens_q"] = made.cu_seqlens
    _, copied = forwards([(dict(given), made.layout)] * 2, monkeypatch)
    assert len(copied) == (2 if "position_ids" in given else 0)  # once a rank


def test_a_packed_batch_on_a_device_is_not_read() -> None:
    """The device is "meta", from which nothing can be copied."""
    made = [next(packed_batches([DOCUMENTS], rank=n, **AHEAD)).to("meta") for n in range(2)]

    def rank(comm: Any) -> None:
        batch = made[comm.rank]
        shard = seqshard.shard_batch(batch, comm)
        assert all(shard.inputs[n].is_meta for n in ("input_ids", "position_ids", "shift_labels"))
        with shard.context() as cut:
            ids = shard.inputs["position_ids"]
            cut.check(torch.Size([1, ids.shape[1], 4, 8]), ids)
            assert cut.batch_mask(MaskDescription(right=0), 1).mask == batch.plan.mask
            cut.asked.add("mask")
            with pytest.raises(NotImplementedError):  # of another tensor nothing is known
                cut.check(torch.Size([1, ids.shape[1], 4, 8]), ids.clone())

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("ranks", "layout", "message"),
    [
        (3, None, "laid out over 3 ranks"),
        (2, "zigzag", "give packed_batches ranks and layout instead"),
        (2, Layout.contiguous(18, 2), "give packed_batches ranks and layout instead"),
    ],
)
def test_packed_batches_of_other_layouts_are_refused(ranks: int, layout: Any, message: str) -> None:
    made = next(packed_batches([DOCUMENTS], rank=0, **{**AHEAD, "ranks": ranks}))
    refused = refusals(2, lambda comm: seqshard.shard_batch(made, comm, layout))
    assert all(message in said for said in refused)
