"""What a wrong call of the chunked loss says, before anything is computed or sent."""

from __future__ import annotations

import re
from typing import Any

import loss_jobs
import pytest
import torch
from ranks import Pool

from annotations.codegen.public_call import declared_calls, qualified
from customized_ops.chunk_linear_cross_entropy import chunk_linear_cross_entropy
from customized_ops.chunk_linear_cross_entropy.loss import checked_losses
from customized_ops.ring_attention.core.comm.inprocess import run_ranks

H, W, T = torch.zeros(2, 7, 5), torch.zeros(11, 5), torch.zeros(2, 7, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": [1.0]}, "hidden must be a tensor, got list"),
        ({"bias": 0.5}, "bias must be a tensor, got float"),
        ({"hidden": H.long(), "weight": W.long()}, "hidden must be floating point, got"),
        ({"weight": W.double()}, "weight is torch.float64 but hidden is torch.float32"),
        ({"bias": torch.zeros(11).half()}, "bias is torch.float16 but hidden is torch.float32"),
        ({"hidden": H.bfloat16()}, "give one dtype, say weight.to(hidden.dtype)"),
        ({"weight": W.to("meta")}, "weight is on meta but hidden is on cpu; give one device"),
        ({"target": T.int()}, "target must be int64, got torch.int32"),
        ({"target": T[:, :6]}, "dim 1 of target is 'l' = 7 from dim 1 of hidden"),
        ({"target": T[0]}, "argument 'target' does not fit the annotation"),
        ({"weight": torch.zeros(11, 4)}, "dim 1 of weight is 'd' = 5 from dim 2 of hidden"),
        ({"weight": torch.zeros(5)}, "argument 'weight' does not fit the annotation"),
        ({"bias": torch.zeros(12)}, "dim 0 of bias is 'v' = 11 from dim 0 of weight"),
        ({"hidden": torch.zeros(5), "target": T[0, 0]}, "argument 'hidden' does not fit"),
        ({"weight": W[:0]}, "weight has no rows; give [v, d] with v of 1 or more"),
        ({"reduction": "average"}, "reduction must be one of mean, sum, none, got 'average'"),
        ({"ignore_index": 1.5}, "ignore_index must be an integer, got 1.5"),
        ({"ignore_index": True}, "ignore_index must be an integer, got True"),
        ({"softcap": -1.0}, "softcap must be 0 (none) or above, got -1.0"),
        ({"chunk_size": 0}, "chunk_size must be None or a number of tokens, 1 or more, got 0"),
        ({"chunk_size": 2.0}, "chunk_size must be None or a number of tokens, 1 or more, got 2.0"),
        ({"return_lse": "yes"}, "return_lse must be True or False, got 'yes'"),
        ({"vocab_size": 11}, "got vocab_size=11 with no vocab_group"),
        ({"vocab_group": [0]}, "got vocab_size=None with a vocab_group"),
        ({"vocab_group": [0], "vocab_size": 0}, "vocab_size must be 1 or more, got 0"),
        ({"vocab_group": [0], "vocab_size": 12}, "weight has 11 rows, but of vocab_size=12 rank"),
        ({"vocab_group": "world", "vocab_size": 11}, "vocab_group: process_group must be"),
        ({"token_group": "world"}, "token_group: process_group must be"),
        ({"token_group": [0, 1]}, "token_group: process_group=(0, 1), but torch.distributed"),
        ({"token_group": [0], "reduction": "sum"}, "token_group goes with reduction='mean'"),
    ],
)
def test_refused(changed: dict[str, Any], message: str) -> None:
    given = {"hidden": H, "weight": W, "target": T, **changed}
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        chunk_linear_cross_entropy(**given)
    assert str(caught.value).startswith("chunk_linear_cross_entropy: ")


def test_rows_that_are_not_this_ranks() -> None:
    """11 rows over 4 ranks are 3, 3, 3 and 2."""

    def call(comm: Any) -> str:
        rows = W.tensor_split(4)[comm.rank]  # 3, 3, 3, 2: fits; then 2 on the first
        rows = rows[:2] if comm.rank == 0 else rows
        try:
            chunk_linear_cross_entropy(H, rows, T, vocab_group=comm, vocab_size=11)
        except ValueError as error:
            return str(error)
        return "no error"

    said = run_ranks(4, call)
    assert said[0] == (
        "chunk_linear_cross_entropy: weight has 2 rows, but of vocab_size=11 rank 0 of 4 holds 3: "
        "3 on each rank, the last ones less"
    )
    assert all("refused on another rank" in text for text in said[1:])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("tokens", "hidden"),
        ("ignore_index", "ignore_index"),
        ("softcap", "softcap"),
        ("bias", "bias"),
    ],
)
def test_ranks_that_disagree(two_ranks: Pool, change: str, told: str) -> None:
    for text in two_ranks.run(loss_jobs.disagree, change):
        assert "the ranks of the group do not agree" in text
        assert told in text


@pytest.mark.parametrize(
    ("plain", "options", "message"),
    [
        ("target", {}, "target is a plain tensor but hidden is a DTensor; give DTensors: distrib"),
        ("hidden", {}, "hidden is a plain tensor but weight is a DTensor; give DTensors: distrib"),
        ("", {"token_group": [0, 1]}, "token_group goes with plain tensors; DTensors know"),
        ("", {"vocab_group": [0, 1], "vocab_size": 11}, "vocab_group goes with plain tensors"),
    ],
)
def test_refused_of_dtensors(
    two_ranks: Pool, plain: str, options: dict[str, Any], message: str
) -> None:
    for text, sent in two_ranks.run(loss_jobs.refused_dtensors, plain, options):
        assert text.startswith(f"chunk_linear_cross_entropy: {message}")
        assert not sent


@pytest.mark.parametrize("name", ["vocab_group", "token_group"])
def test_groups_in_an_engine_that_generates_code(name: str) -> None:
    call = declared_calls()[qualified(checked_losses)]
    given = call.signature.bind(H, W, T, None, -100, "mean", 0.0, None, False, None, None, None)
    given.apply_defaults()
    assert call.shapes(given.arguments, 2)
    with pytest.raises(NotImplementedError, match=f"{name} is for calls without an engine.*None"):
        call.shapes({**given.arguments, name: [0, 1]}, 2)
