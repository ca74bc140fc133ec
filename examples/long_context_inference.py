"""Generate from a prompt that is too long for one device: its keys and values stay on many.

The prompt is prefilled over ranks, with causal attention in zigzag shards. Each rank keeps the keys
and values of its tokens. All ranks compute each new token, but on each rank it attends only to that
rank's keys; (out, lse) of the ranks are merged up a tree and the result is broadcast (Tree
Attention, Shyam et al., arXiv:2408.04093, 2024). Ranks take turns in keeping new keys. Shows that
the tokens are those of one device.

    python examples/long_context_inference.py               2 processes
    python examples/long_context_inference.py --ranks 4 --prompt 2000 --new 30
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from shared.launch import count, on_ranks, verdict
from shared.llama import Attention, Llama, LlamaConfig, rotate
from shared.text_corpus import PackedText, load_documents
from torch import Tensor, nn

from customized_ops.ring_attention import (
    AttnMask,
    Layout,
    wrap_masked_attn_func,
    wrap_zigzag_attn_func,
)
from customized_ops.ring_attention.core.merge import merge_


class Cut:
    """How the layers attend on one rank: the prompt first, then a token at a time."""

    position = 0  # of the current new token

    def __init__(self, layout: Layout) -> None:
        self.layout, self.rank, self.ranks = layout, dist.get_rank(), dist.get_world_size()
        self.kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # [b, l, g, d] each

    def __call__(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer not in self.kept:
            self.kept[layer] = k, v
            group = dist.group.WORLD
            return wrap_zigzag_attn_func(q, k, v, process_group=group, layout=self.layout)
        if self.position % self.ranks == self.rank:
            old_k, old_v = self.kept[layer]
            self.kept[layer] = torch.cat([old_k, k], 1), torch.cat([old_v, v], 1)
        k, v = self.kept[layer]
        mask = AttnMask.full(1, k.shape[1])
        return self.merged(*wrap_masked_attn_func(q, k, v, mask, return_lse=True))

    def merged(self, out: Tensor, lse: Tensor) -> Tensor:
        """out over all keys, merged from each rank's out [b, 1, h, d] and lse [b, h, 1]."""
        step, both = 1, torch.cat([out, lse.transpose(1, 2).unsqueeze(-1).to(out)], -1)
        while step < self.ranks:
            if self.rank % (2 * step) == step:
                dist.send(both, self.rank - step)
                break
            if self.rank + step < self.ranks:
                part = torch.empty_like(both)
                dist.recv(part, self.rank + step)
                part_lse = part[..., -1].transpose(1, 2).to(lse)
                merge_(both[..., :-1], lse, part[..., :-1], part_lse)
                both[..., -1] = lse.transpose(1, 2)
            step *= 2
        dist.broadcast(both, 0)
        return both[..., :-1]


class Whole(dict[nn.Module, tuple[Tensor, Tensor]]):
    """The same on one device, which keeps all keys and values."""

    def __call__(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self:
            k, v = (torch.cat(pair, 1) for pair in zip(self[layer], (k, v), strict=True))
        self[layer] = k, v
        return wrap_masked_attn_func(q, k, v, AttnMask.causal(q.shape[1], k.shape[1]))


def logits_of(model: Llama, attend: Cut | Whole, tokens: Tensor, positions: Tensor) -> Tensor:
    """[b, l, vocabulary] for ``tokens`` [b, l] at ``positions`` [l]."""
    angles = (positions[None, :, None] * model.inv_freq).unsqueeze(2)
    cos, sin = angles.cos(), angles.sin()
    x = model.embed(tokens)
    for block in model.blocks:
        layer: Attention = block.attention
        y = block.attention_norm(x)
        weights = layer.wq, layer.wk, layer.wv
        shapes = [(w.out_features // layer.head_dim, layer.head_dim) for w in weights]
        q, k, v = (w(y).unflatten(2, s) for w, s in zip(weights, shapes, strict=True))
        x = x + layer.wo(attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(2))
        y = block.mlp_norm(x)
        x = x + block.down(nn.functional.silu(block.gate(y)) * block.up(y))
    return model.norm(x) @ model.embed.weight.T


@torch.no_grad()
def generate(model: Llama, attend: Cut | Whole, prompt: Tensor, new: int) -> Tensor:
    """Greedy decoding: logits [1, new, vocabulary] of the tokens after ``prompt`` [1, l]."""
    length, cut = prompt.shape[1], isinstance(attend, Cut)
    own = torch.from_numpy(attend.layout.positions(attend.rank)) if cut else torch.arange(length)
    own = own.to(prompt.device)
    logits = logits_of(model, attend, prompt[:, own], own)[:, own == length - 1].sum(1)
    if cut:  # one rank holds the last token; the others add nothing
        dist.all_reduce(logits)
    each = [logits]
    for position in range(length, length + new - 1):
        attend.position = position
        token, at = each[-1].argmax(-1, keepdim=True), torch.tensor([position]).to(prompt.device)
        each.append(logits_of(model, attend, token, at)[:, 0])
    return torch.stack(each, 1)


def main(given: argparse.Namespace, device: torch.device) -> int:
    """Run on every rank; returns 0 if the generated tokens are those of one device."""
    torch.manual_seed(0)
    sizes = dict(dim=64, layers=2, heads=4, kv_heads=2, hidden=96)
    model = Llama(LlamaConfig(**sizes)).double().to(device)
    for weight in model.parameters():  # large enough that tokens differ
        nn.init.normal_(weight, std=0.4)
    text = PackedText(load_documents(max_bytes=100_000), given.prompt).batch(0, packed=False)
    prompt = text.tokens.to(device)
    cut = Cut(Layout.zigzag(given.prompt, dist.get_world_size()))
    logits = generate(model, cut, prompt, given.new)
    whole = generate(model, Whole(), prompt, given.new)
    tokens = logits.argmax(-1)
    if dist.get_rank() == 0:
        kept, _ = next(iter(cut.kept.values()))
        print(f"rank 0 keeps {kept.shape[1]} tokens' keys; generated: {tokens[0].tolist()}")
    others = (tokens != whole.argmax(-1)).sum().item()
    wrong = verdict("the tokens are those of one device", others, 0)
    return wrong | verdict("so are their logits", (logits - whole).abs().max().item(), 1e-10)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--prompt", type=count, default=500, help="tokens (bytes of text)")
    parser.add_argument("--new", type=count, default=12, help="tokens to generate")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    on_ranks(lambda device: main(options, device), options.ranks)
