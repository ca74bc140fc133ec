"""Random trials: each kind of case has its turn, over any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from .kinds import KINDS
from .trial import Trial

MOST_RANKS = 8
# How often each kind is drawn: attention has the most functions, options and ways to run.
SHARES = {
    "attention": 6,
    "linear-attention": 2,
    "convolution": 1,
    "loss": 2,
    "rollouts": 1,
    "moves": 1,
}
# Without parts of rollouts, which are a rank's already, and layouts, which name the ranks.
LAYERS = ("attention", "linear-attention", "convolution", "loss")


def trial(random: Random, kinds: Sequence[str] = tuple(KINDS)) -> Trial:
    """The next call, of one of these kinds."""
    ranks = random.randint(1, MOST_RANKS)
    (kind,) = random.choices(kinds, [SHARES[name] for name in kinds])
    return Trial(KINDS[kind](random, ranks), ranks)


def layer(random: Random, ranks: int, kinds: Sequence[str] = LAYERS) -> Trial:
    """The next trial of ``parallelize``, over so many ranks."""
    (kind,) = random.choices(kinds, [SHARES[name] for name in kinds])
    case = KINDS[kind](random, 1).in_a_layer
    return Trial(case, ranks, random.choice(case.policies(ranks)))
