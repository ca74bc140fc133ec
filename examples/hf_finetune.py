"""Train a Hugging Face Llama on packed documents, its tokens cut over several processes.

The model is transformers' own, with ``attn_implementation="seqshard"``. Every rank draws the same
batch of packed documents, keeps its own tokens and runs the model on them; attention alone
communicates. At the end the loss curve is compared with the same run on one rank.

    python examples/hf_finetune.py                      2 processes, tokens in zigzag
    python examples/hf_finetune.py --nproc 4 --layout contiguous
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from text_corpus import VOCAB_SIZE, PackedText, load_documents
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from customized_ops.ring_attention.api import transformers as seqshard

TOLERANCE = 1e-4  # largest difference of the two loss curves


def make_model() -> LlamaForCausalLM:
    """A byte-level Llama from a config; ``from_pretrained`` takes the same last argument."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attn_implementation="seqshard",
    )
    return LlamaForCausalLM(config)


def train(
    name: str, group: dist.ProcessGroup | None, text: PackedText, args: argparse.Namespace
) -> list[float]:
    """Losses of ``args.steps`` steps over the ranks of ``group``, or on this rank alone."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6)
    shown = dist.get_rank() == 0
    losses: list[float] = []
    bar = tqdm(range(args.steps), desc=name, unit="step", disable=None if shown else True)
    for step in bar:
        shard = seqshard.shard_batch(inputs(text, step), group, args.layout)
        with shard.context():
            share = model(**shard.inputs).loss  # of this rank's tokens, by the count of all
        optimizer.zero_grad()
        share.backward()
        seqshard.sum_gradients(model.parameters(), group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(seqshard.sum_over_ranks(share, group).item())
        if shown and (step % 10 == 0 or step == args.steps - 1):
            bar.write(f"{name}  step {step:3d}  loss {losses[-1]:.4f}")
    return losses


def inputs(text: PackedText, step: int) -> dict[str, Any]:
    """A batch as transformers has it: position_ids restart where documents begin, and the label of
    a document's first token is left out, for models shift labels by one."""
    batch = text.batch(step)
    labels = batch.tokens.masked_fill(batch.position_ids == 0, -100)
    return {"input_ids": batch.tokens, "labels": labels, "position_ids": batch.position_ids}


def main(args: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cores = os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // world))
    seqshard.register()
    text = PackedText(load_documents(), args.seq_len, seed=0)
    losses = train(f"{world} ranks", dist.group.WORLD, text, args)

    difference = 0.0
    if rank == 0:
        torch.set_num_threads(cores)
        alone = train("one rank", None, text, args)
        # numpy's max, unlike Python's, is NaN where any loss is.
        difference = float(np.abs(np.subtract(losses, alone)).max())
        print(
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; largest difference from one rank over "
            f"{args.steps} steps: {difference:.1e} (allowed {TOLERANCE:.0e})"
        )
    dist.barrier()
    dist.destroy_process_group()
    return int(not difference < TOLERANCE)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, default=2, help="processes to cut the tokens over")
    parser.add_argument("--layout", choices=("zigzag", "contiguous", "striped"), default="zigzag")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens (bytes of text) a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    if "RANK" in os.environ:
        sys.exit(main(arguments))
    # Not under torchrun yet: start the ranks. torchrun takes --nproc for an option of its own.
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", arguments.nproc]
    given = {name: value for name, value in vars(arguments).items() if name != "nproc"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(sys.executable, [sys.executable, *map(str, launch), __file__, *flags])
