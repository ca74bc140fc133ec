"""Train a Hugging Face Llama on packed documents, its tokens cut over several processes.

The model is transformers' own, with ``attn_implementation="seqshard"``. Every rank draws the same
batch of packed documents, keeps its own tokens and runs the model on them; attention alone
communicates. With ``--layout balanced`` ranks have the same work whatever the documents are, and
a thread lays out and plans the next batches meanwhile. At the end the loss curve is compared with
the same run on one rank.

    python examples/hf_finetune.py                      2 processes, tokens in zigzag
    python examples/hf_finetune.py --nproc 4 --layout balanced
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from shared.curves import losses_of, same_losses, share_cores
from shared.launch import count, on_ranks
from shared.text_corpus import VOCAB_SIZE, PackedText, load_documents
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from customized_ops.ring_attention import packed_batches
from customized_ops.ring_attention.api import transformers as seqshard

LAYOUTS = ("zigzag", "contiguous", "striped", "balanced")
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
    name: str,
    group: dist.ProcessGroup | None,
    text: PackedText,
    args: argparse.Namespace,
    device: torch.device,
) -> list[float]:
    """Losses of ``args.steps`` steps over the ranks of ``group``, or on this rank alone."""
    model = make_model().to(device)
    config = model.config
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6)

    planned = packed_batches(
        (documents(text, n) for n in range(args.steps)),
        ranks=1 if group is None else group.size(),
        rank=0 if group is None else group.rank(),
        heads=(config.num_attention_heads, config.num_key_value_heads),
        head_dim=config.hidden_size // config.num_attention_heads,
    )

    def step(n: int) -> Tensor:
        if args.layout == "balanced":
            shard = seqshard.shard_batch(next(planned).to(device), group)
        else:
            batch = {name: t.to(device) for name, t in inputs(text, n).items()}
            shard = seqshard.shard_batch(batch, group, args.layout)
        with shard.context():
            share = model(**shard.inputs).loss  # sum over this rank's tokens / count of all
        optimizer.zero_grad()
        share.backward()
        seqshard.sum_gradients(model, group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return seqshard.sum_over_ranks(share, group)

    return losses_of(name, args.steps, args.seq_len, step)


def documents(text: PackedText, step: int) -> list[Tensor]:
    """The documents of a batch, int64[n] each."""
    batch = text.batch(step)
    ends = batch.cu_seqlens.tolist()
    return [batch.tokens[0, start:stop] for start, stop in pairwise(ends) if start < stop]


def inputs(text: PackedText, step: int) -> dict[str, Tensor]:
    """A batch in transformers' form: position_ids restart where documents begin, and the label of
    a document's first token is left out, since models shift labels by one."""
    batch = text.batch(step)
    labels = batch.tokens.masked_fill(batch.position_ids == 0, -100)
    return {"input_ids": batch.tokens, "labels": labels, "position_ids": batch.position_ids}


def main(args: argparse.Namespace, device: torch.device) -> int:
    """Run on every rank; returns 0 if the losses over ranks are those of one rank."""
    world = dist.get_world_size()
    share_cores(world)
    seqshard.register()
    text = PackedText(load_documents(), args.seq_len, seed=0)
    losses = alone = train(f"{world} ranks", dist.group.WORLD, text, args, device)
    if dist.get_rank() == 0:  # the others wait
        share_cores(1)
        alone = train("one rank", None, text, args, device)
    return same_losses(losses, alone, TOLERANCE)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=count, default=2, help="processes to cut the tokens over")
    parser.add_argument("--layout", choices=LAYOUTS, default="zigzag")
    parser.add_argument("--steps", type=count, default=30)
    parser.add_argument("--seq-len", type=count, default=1024, help="tokens (bytes of text) a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = parse()
    on_ranks(lambda device: main(given, device), given.nproc, gpus=False)
