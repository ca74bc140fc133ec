"""An op that a script registers for itself, trained by nnscaler; ranks are started by torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from annotate_an_op import batch
from own_ops.group_norm import ALONG_L, mean
from torch import Tensor, nn

from annotations import PartitionRule, register_op
from on_nnscaler.support import autodist, jobs
from on_nnscaler.support.jobs import Training


@register_op(
    "b l g c^ -> b l g c^",
    name="script::centred",
    rule=PartitionRule(communicates={"l": ALONG_L}),
)
def centred(x: Tensor, group: str = "") -> Tensor:
    """Less the mean of all tokens and of the channels of a group."""
    return x - mean(x, group)


class Model(nn.Module):
    """``x: [b, l, 32]`` to a number."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return centred(self.project(x).view(*x.size()[:-1], 2, 4)).pow(3).sum()


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


if __name__ == "__main__":
    assert centred.__module__ == "__main__"
    dist.init_process_group("gloo")
    policy, folder = sys.argv[1:]
    settings = autodist.settings(Path(folder), parallel_profile=True)  # in processes of its own
    config = {"pas_config": settings} if policy == "cp" else {}
    training = Training(model, batch, policy, config=config)
    ranks: list[jobs.Rank] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(ranks, jobs.train(training))
    assert "torch.ops.script.centred(" in ranks[0].code, ranks[0].code
    jobs.assert_equals_alone(ranks, training)
    if dist.get_rank() == 0:
        print(ranks[0].plan)
    dist.destroy_process_group()
