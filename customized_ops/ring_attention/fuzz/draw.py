"""Random trials: each kind of case has its turn, over any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
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
LAYER_SHARE = 50  # one in so many trials is of parallelize
LAYER_RANKS = 2


def trials(seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Iterator[Trial]:
    """Without an end: calls of these kinds, and after each 49 of them a layer, if one can be drawn.

    Calls and layers are drawn each from a stream of their own, so that one more or fewer of these
    changes nothing about those.
    """
    of_calls, of_layers = Random(seed), Random(f"layers of {seed}")
    in_layers = [kind for kind in kinds if kind in LAYERS]
    for number in count(1):
        if in_layers and number % LAYER_SHARE == 0:
            yield layer(of_layers, LAYER_RANKS, in_layers)
        else:
            yield trial(of_calls, kinds)


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
