"""Packed batches that are refused."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from customized_ops.ring_attention import AttnMask, Layout, PackDocuments, packed_batches, warm_up
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan.cost_model import H200_NCCL, CostModel
from customized_ops.ring_attention.core.topology import Topology

from .packed_cases import BATCHES, HEADS


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        ({"ranks": 4}, "ranks=4, but packed_batches was given ranks=2;"),
        ({"rank": 0}, "rank=0, but packed_batches was given rank=1;"),
        ({"heads": (4, 4)}, "heads=(4, 4), but packed_batches was given heads=(4, 2);"),
        ({"causal": False}, "causal=False, but packed_batches was given causal=True;"),
        (
            {"window_size": (3, -1), "layout": "contiguous"},
            "window_size=(3, -1), layout='contiguous', but packed_batches was given "
            "window_size=(-1, -1), layout='balanced';",
        ),
        ({"whole": True}, "whole=True, but packed_batches was given whole=False;"),
    ],
)
def test_batches_that_were_packed_otherwise_are_refused(
    packed: dict[str, Any], message: str
) -> None:
    asked: dict[str, Any] = {"ranks": 2, "rank": 1, "heads": HEADS}
    pack = pickle.loads(pickle.dumps(PackDocuments(**{**asked, **packed})))
    batches = packed_batches([pickle.loads(pickle.dumps(pack(BATCHES[0])))], **asked)
    with pytest.raises(ValueError) as error:
        next(batches)
    assert message in str(error.value)


def test_batches_of_other_rates_or_made_by_hand_are_passed_on() -> None:
    asked: dict[str, Any] = {"ranks": 2, "rank": 1, "heads": HEADS}
    with_rates = PackDocuments(2, 1, HEADS, costs=H200_NCCL)(BATCHES[0])
    by_hand = replace(PackDocuments(4, 1, HEADS)(BATCHES[0]), packed_by=None)
    given = [with_rates, by_hand]
    for batch, found in zip(given, packed_batches(given, **asked), strict=True):
        assert found is batch
    size = [len(pickle.dumps(batch)) for batch in (with_rates, replace(with_rates, packed_by=None))]
    assert size[0] - size[1] < 1000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layout": "striped"}, "layout must be one of ('balanced', 'contiguous'), got 'striped'"),
        ({"layout": ["balanced"]}, "layout must be one of ('balanced', 'contiguous'), got ['bal"),
        ({"rank": 2}, "rank must be 0 to 1, got 2"),
        ({"rank": 0.5}, "rank must be 0 to 1, got 0.5"),
        ({"ranks": None}, "ranks must be a number of ranks, 1 or more, got None"),
        ({"costs": CostModel(topology=Topology((2, 2)))}, "of the hosts of 2 ranks, got '2x2'"),
        (
            {"costs": None},
            "costs must be a CostModel, such as group_costs(process_group), got None",
        ),
        ({"head_dim": (64, 64)}, "head_dim must be 1 or more, got (64, 64)"),
        ({"itemsize": 0}, "itemsize must be 1 or more, got 0"),
        ({"whole": "yes"}, "whole must be True or False, got 'yes'"),
        ({"ahead": 0}, "ahead must be an integer of at least 1, got 0"),
        ({"ahead": "2"}, "ahead must be an integer of at least 1, got '2'"),
        ({"loader": 5}, "loader must be a DataLoader, or other batches to iterate over, got 5"),
        ({"loader": [5]}, "documents must be a list of documents, got 5"),
        ({"loader": [[]]}, "a batch has no documents"),
        ({"loader": [[[1], [[2]]]]}, "documents[1] must be a row of integers, got int64 (1, 1)"),
        ({"loader": [[[0.5]]]}, "documents[0] must be a row of integers, got float64 (1,)"),
        ({"loader": [[1, 2]]}, "documents[0] must be a row of integers, got a number; a batch is"),
        (
            {"loader": [[{"input_ids": [1], "text": "a"}]]},
            "documents[0] has 'input_ids', 'text'; give input_ids, and perhaps labels and",
        ),
        (
            {"loader": [{"input_ids": [[1], [2]]}]},
            "documents must be a list of documents, got a dict with 'input_ids'",
        ),
        ({"loader": [[{"labels": [1]}]]}, "documents[0] has 'labels'; give input_ids"),
        (
            {"loader": [[[1], {"input_ids": [1, 2], "labels": [1]}]]},
            "documents[1]['labels'] has 1 entries for 2 tokens",
        ),
        ({"loader": [[{}]]}, "documents[0] has nothing; give input_ids"),
        ({"loader": [[{"input_ids": [[1]]}]]}, "documents[0]['input_ids'] must be a row of"),
        (
            {"loader": [[{"input_ids": [1, 2], "labels": [1, -1]}]]},
            "documents[0]['labels'] must be the ids again, or -100; they are shifted here",
        ),
        (
            {"loader": [[{"input_ids": [1, 2], "attention_mask": [1, 0]}]]},
            "documents[0]['attention_mask'] must be ones: leave padding out",
        ),
        (
            {"loader": [[{"input_ids": [1], "labels": [0.5]}]]},
            "documents[0]['labels'] must be a row of integers",
        ),
        (
            {"loader": [[([1, 2], 1)]]},
            "documents[0] must be a row of integers on the host, got ([1",
        ),
        (
            {"loader": [[torch.ones(3, device="meta", dtype=torch.int64)]]},
            "documents[0] must be a row of integers on the host, got tensor(",
        ),
    ],
)
def test_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        list(packed_batches(**{"loader": BATCHES, "ranks": 2, "rank": 0, "heads": HEADS} | given))
    assert str(error.value).startswith("packed_batches: ") and message in str(error.value)


@pytest.mark.parametrize("heads", [[4, 2], np.array([4, 2])], ids=str)
def test_heads_are_any_two_integers(heads: Any) -> None:
    batch = PackDocuments(2, 0, heads, window_size=[5, -1])(BATCHES[0])  # type: ignore[arg-type]
    pack = PackDocuments(2, 0, HEADS, window_size=(5, -1))
    assert batch.packed_by == pack and pack.take(batch) is batch
    mask, layout = batch.plan.mask, batch.layout
    assert make_plan(mask, layout, heads=heads, team_size=None) is batch.plan


@pytest.mark.parametrize("heads", [(4,), 4, "42", (4.0, 2), (4, 2, 1)], ids=str)
def test_other_heads_are_refused(heads: Any) -> None:
    said = re.escape(f"heads must be two integers, the query and the key heads, got {heads!r}")
    with pytest.raises(ValueError, match="packed_batches: " + said):
        next(packed_batches(BATCHES, ranks=2, rank=0, heads=heads))
    with pytest.raises(ValueError, match="make_plan: " + said):
        make_plan(AttnMask.causal(8), Layout.contiguous(8, 2), heads=heads)


@pytest.mark.parametrize("heads", [(4, 3), (0, 2), (4, -2), (4, 0)], ids=str)
def test_key_heads_divide_query_heads(heads: tuple[int, int]) -> None:
    said = re.escape(f"heads must be query heads and key heads that divide them, got {heads}")
    with pytest.raises(ValueError, match="packed_batches: " + said):
        next(packed_batches(BATCHES, ranks=2, rank=0, heads=heads))
    with pytest.raises(ValueError, match="warm_up: " + said):
        warm_up(64, heads=heads, head_dim=8, process_group=None)


def test_documents_of_one_token_have_no_target() -> None:
    batch = PackDocuments(2, 0, HEADS)([[3], [4], [5]])
    logits = torch.zeros(len(batch.tokens), 9)
    loss = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum")
    assert batch.target_count == 0 and loss / max(batch.target_count, 1) == 0


def test_what_a_module_cannot_cut_is_refused() -> None:
    given: dict[str, Any] = {"ranks": 3, "rank": 0, "heads": HEADS}
    batches = packed_batches([[[1], [2]]], **given, whole=True)
    with pytest.raises(ValueError, match=r"a batch of 2 tokens cannot be cut over 3 ranks"):
        next(batches)
    assert next(packed_batches([[[1], [2]]], **given)).layout.total == 2
