"""Random trials of every kind of case, over any number of ranks."""

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
# Without parts of rollouts, which already belong to a rank, and moves: their layouts name ranks.
LAYERS = ("attention", "linear-attention", "convolution", "loss")
LAYER_SHARE = 50  # one in this many trials is of parallelize
LAYER_RANKS = 2


def trials(seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Iterator[Trial]:
    """An endless stream: calls of these kinds, and after every 49 a layer, if one can be drawn.

    Calls and layers are drawn from separate random streams, so that one more or fewer of either
    does not change the other.
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
    """The next trial of ``parallelize``, over this many ranks."""
    (kind,) = random.choices(kinds, [SHARES[name] for name in kinds])
    case = KINDS[kind](random, 1).in_a_layer
    return Trial(case, ranks, random.choice(case.policies(ranks)))
