"""A Hugging Face Llama under transformers' Trainer, with accelerate's context parallelism.

``ParallelismConfig(cp_size=...)`` is accelerate's own. Only ``ContextParallel`` before ``Trainer``
and ``attn_implementation="seqshard"`` are new. Batches are packed as for supervised fine-tuning:
position_ids restart with each document, and prompts are not learnt. ``--loop`` uses no Trainer.
Shows that losses and weights are those of one process.

    python examples/hf_trainer.py                           2 processes
    python examples/hf_trainer.py --loop --layout contiguous
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from shared.launch import count, on_ranks, verdict
from shared.text_corpus import VOCAB_SIZE, PackedText, load_documents
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from customized_ops.ring_attention.api.frameworks.accelerate import ContextParallel, use_seqshard
from customized_ops.ring_attention.api.transformers import register, shard_batch, sum_over_ranks

LOSS_TOLERANCE = 1e-5  # transformers adds losses up in fp32, which does not affect gradients
PROMPT = 8  # first tokens of a document, its prompt, which is not learnt
SGD = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
Rows = list[dict[str, Tensor]]
QUIET = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}


class OnCpu(ParallelismConfig):
    """A config for CPUs, where accelerate refuses its own; DDP takes the place of FSDP2 there."""

    def _validate_accelerator(self, accelerator: Accelerator) -> None: ...


class SequenceTrainer(ContextParallel, Trainer):
    """A Trainer that records the loss of each step."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The Trainer's: this rank's share of the loss, times the number of ranks."""
        self.losses.append(super().training_step(*args, **kwargs))
        return self.losses[-1]


def make_model(attention: str) -> LlamaForCausalLM:
    """A byte-level Llama in fp64; ``from_pretrained`` takes the same last argument."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE}
    config = LlamaConfig(**sizes, **heads, attn_implementation=attention)
    return LlamaForCausalLM(config).double()


def batches(given: argparse.Namespace) -> Rows:
    """Rows of packed documents, as a padding-free collator makes them."""
    text = PackedText(load_documents(max_bytes=100_000), given.tokens)
    rows = []
    for step in range(given.steps * given.dp):
        batch = text.batch(step)
        labels = batch.tokens.masked_fill(batch.position_ids < PROMPT, -100)
        row = {"input_ids": batch.tokens, "labels": labels, "position_ids": batch.position_ids}
        rows.append({name: t[0] for name, t in row.items()})
    return rows


def by_trainer(model: LlamaForCausalLM, rows: Rows, given: argparse.Namespace) -> list[Tensor]:
    """The mean loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = OnCpu(cp_size=given.cp, dp_shard_size=given.dp)
        steps = {"max_steps": given.steps, "per_device_train_batch_size": 1, "use_cpu": True}
        arguments = TrainingArguments(folder, parallelism_config=sizes, **steps, **SGD, **QUIET)
        trainer = SequenceTrainer(model, arguments, train_dataset=rows)
        trainer.sequence_layout, trainer.losses = given.layout, []
        trainer._get_train_sampler = lambda *_: None  # rows in order, as in the loops
        trainer.train()
    return [sum_over_ranks(t / dist.get_world_size(), dist.group.WORLD) for t in trainer.losses]


def by_loop(model: LlamaForCausalLM, rows: Rows, given: argparse.Namespace) -> list[Tensor]:
    """The same with accelerate alone."""
    sizes = {"cp_size": given.cp, "dp_shard_size": given.dp}
    accelerator = Accelerator(cpu=True, parallelism_config=OnCpu(**sizes))
    group = use_seqshard(accelerator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=1))
    (model, optimizer, loader), losses = prepared, []
    for batch in loader:
        learnt = (batch["labels"][:, 1:] != -100).sum()  # the same on all ranks of a "cp" group
        batch["num_items_in_batch"] = accelerator.reduce(learnt) / given.cp
        shard = shard_batch(batch, group, given.layout)
        with shard.context():
            share = model(**shard.inputs).loss  # sum over this rank's tokens / count of all
        accelerator.backward(share * dist.get_world_size())  # gradients are averaged
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum_over_ranks(share, dist.group.WORLD))
    return losses


def alone(model: LlamaForCausalLM, rows: Rows, dp: int) -> list[Tensor]:
    """The same in this process, with transformers' own attention."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in DataLoader(rows, batch_size=dp):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def main(given: argparse.Namespace, device: torch.device) -> int:
    """Run on every rank; returns 0 if losses and weights are those of one process."""
    register()
    rows, model, single = batches(given), make_model("seqshard"), make_model("sdpa")
    losses = torch.stack((by_loop if given.loop else by_trainer)(model, rows, given))
    difference = (losses - torch.stack(alone(single, rows, given.dp))).abs().max().item()
    if dist.get_rank() == 0:
        print(f"losses on {given.dp} x {given.cp} ranks: {[round(x, 4) for x in losses.tolist()]}")
    both = zip(model.parameters(), single.parameters(), strict=True)
    weights = max((a.detach() - b.detach()).abs().max().item() for a, b in both)
    failed = verdict("losses are those of one process", difference, LOSS_TOLERANCE)
    return failed | verdict("so are the weights after the last step", weights, 1e-10)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cp", type=count, default=2, help="ranks that each row is cut over")
    parser.add_argument("--dp", type=count, default=1, help="groups of these, each with its rows")
    parser.add_argument("--layout", choices=("zigzag", "contiguous", "striped"), default="zigzag")
    parser.add_argument("--tokens", type=count, default=256, help="in a batch")
    parser.add_argument("--steps", type=count, default=3)
    parser.add_argument("--loop", action="store_true", help="over an Accelerator, no Trainer")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    on_ranks(lambda device: main(options, device), options.cp * options.dp, gpus=False)
