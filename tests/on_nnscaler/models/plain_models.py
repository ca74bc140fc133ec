"""A plain torch model for the harness's own tests, with one op registered with nnscaler."""

from __future__ import annotations

import nnscaler
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, HEADS = 32, 16, 4


@nnscaler.register_op("* d^ -> * d^")
def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class Block(nn.Module):
    """Two linears around gelu, after a softmax attention without biases.

    A bias on keys has a gradient of zero up to rounding, which Adam blows up to full steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.k = nn.Linear(DIM, DIM, bias=False)
        self.v = nn.Linear(DIM, DIM, bias=False)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(self.q(x), self.k(x).transpose(1, 2)) * DIM**-0.5
        x = x + torch.matmul(F.softmax(scores, dim=-1), self.v(x))
        return x + self.down(F.gelu(self.up(x)))


class Tiny(nn.Module):
    """``{"tokens": [b, l], "targets": [b, l]}`` to a mean cross entropy."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.place = nn.Embedding(64, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, sample: dict[str, Tensor]) -> Tensor:
        tokens = sample["tokens"]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(rms_norm(x))
        return F.cross_entropy(logits.view(-1, VOCAB), sample["targets"].view(-1))


def tiny(layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return Tiny(layers).double()


def batch(seed: int) -> dict[str, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCAB, (2, 2, 8), generator=g)
    return {"sample": {"tokens": tokens, "targets": targets}}
