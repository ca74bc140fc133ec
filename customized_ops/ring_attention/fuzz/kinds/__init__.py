"""The kinds of cases that are drawn: each is one family of the package's functions."""

from collections.abc import Callable
from random import Random

from . import attention_draws, convolution, linear_attention, loss, moves, rollouts
from .distributed_case import DistributedCase

# Each draws a case from a source of random numbers and a number of ranks.
KINDS: dict[str, Callable[[Random, int], DistributedCase]] = {
    "attention": attention_draws.drawn,
    "linear-attention": linear_attention.drawn,
    "convolution": convolution.drawn,
    "loss": loss.drawn,
    "rollouts": rollouts.drawn,
    "moves": moves.drawn,
}
