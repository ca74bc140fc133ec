"""A program that calls nnscaler's own ``parallelize``; ranks are started by torchrun.

Arguments: a form of `shuffle_models.Shuffling`, and the folder for generated code.
"""

from __future__ import annotations

import sys
from typing import Any

import nnscaler
import torch
import torch.distributed as dist
from nnscaler.policies import OpPartition, OpPlan, get_pas_ops

from on_nnscaler.models import shuffle_models
from on_nnscaler.support.cpu import on_cpu
from on_nnscaler.support.policies import place_of

OURS = ("shuffle", "_attn_")


def policy(graph: Any, config: Any) -> Any:
    """Our ops are cut on their tokens, the others on none."""
    for node in get_pas_ops(graph):
        if any(part in node.name for part in OURS):
            tokens = "lq" if "allgather" in node.name else "l"
            yield OpPlan(node, partition=OpPartition(*place_of(node, tokens)))


if __name__ == "__main__":
    form, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    with on_cpu():
        model = shuffle_models.training(form).model()
        ranks = dist.get_world_size()
        parallel = nnscaler.parallelize(
            model,
            shuffle_models.batch(0),
            policy,
            nnscaler.ComputeConfig(ranks, ranks, trace_strategy="cpu"),
            gen_savedir=folder,
            reuse="override",
        )
        batch = shuffle_models.batch(1)
        loss, expected = parallel(**batch), model(**batch)
        loss.backward()
        expected.backward()
        parallel.sync_grad()
    assert abs(loss.item() - expected.item()) < 1e-10, (loss.item(), expected.item())
    of_one = {n: p.grad for n, p in model.named_parameters()}
    for name, parameter in parallel.named_parameters():
        original = parallel.fullmap[name].orig_name
        torch.testing.assert_close(parameter.grad, of_one[original], rtol=1e-10, atol=1e-10)
    print("equal", flush=True)
    dist.destroy_process_group()
