"""Checking what a user passes, before anything is computed or sent.

Every rule is stated once here. An error names the op, the argument and its shape, and says what
would fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..core.comm.comm_groups import GroupLike, comm_by_name, group_name
from ..core.layout import Layout
from ..core.merge.merge import accumulation_dtype
from . import agreement

T = TypeVar("T")


class ArgumentError(ValueError):
    """An argument that an attention op cannot take."""


def refuse_unsupported(op: str, **given: object) -> None:
    """Raise for arguments that are part of the signature but not supported yet.

    Raises:
        NotImplementedError: one of ``given`` is set (neither None, False nor 0); names it.
    """
    for name, value in given.items():
        if value is not None and not _is_off(value):
            shown = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(
                f"{op}: {name}={shown} is not supported yet; leave it at its default"
            )


def window_bounds(op: str, window_size: Sequence[int]) -> tuple[int, int]:
    """``window_size`` as (left, right), -1 where unbounded.

    Raises:
        ArgumentError: not two integers of -1 or more.
    """
    bounds = tuple(window_size) if isinstance(window_size, Sequence) else ()
    if len(bounds) != 2 or not all(is_integer(n, -1) for n in bounds):
        raise ArgumentError(
            f"{op}: window_size must be (left, right), each a number of tokens or -1 for no bound, "
            f"got {window_size!r}"
        )
    return int(bounds[0]), int(bounds[1])


def scale_of(op: str, softmax_scale: float | None, q: Tensor) -> float:
    """The softmax scale; 1 / sqrt(head dim) if None.

    Raises:
        ArgumentError: not a finite number, or None where the head dim is 0.
    """
    if softmax_scale is None:
        if q.shape[-1] == 0:
            raise ArgumentError(
                f"{op}: softmax_scale must be given where the head dim of q is 0, got None for "
                f"q of shape {tuple(q.shape)}"
            )
        return float(q.shape[-1] ** -0.5)
    value = _number(op, "softmax_scale", softmax_scale, "a number or None")
    if not -math.inf < value < math.inf:
        raise ArgumentError(f"{op}: softmax_scale must be finite, got {softmax_scale!r}")
    return value


def flag_of(op: str, name: str, value: bool) -> bool:
    """A switch as a bool; 0, 1 and numpy's bools will do.

    Raises:
        ArgumentError: something else, which might mean anything.
    """
    if not _is_flag(value):
        raise ArgumentError(f"{op}: {name} must be True or False, got {value!r}")
    return bool(value)


def ring_group(enable_ring: bool, process_group: GroupLike) -> GroupLike:
    """``process_group``, or None where ``enable_ring`` is off.

    Anything but a switch keeps the group, whose ranks are to hear that it is refused.
    """
    return None if _is_off(enable_ring) else process_group


# Read once: nnscaler's tracer puts stand-ins for these where this module looks them up.
_BOOLS, _INTEGERS = (bool, np.bool_), (int, np.integer)


def _is_flag(value: object) -> bool:
    return isinstance(value, _BOOLS) or (is_integer(value) and value in (0, 1))


def _is_off(value: object) -> bool:
    return _is_flag(value) and not bool(value)


def is_integer(value: object, least: int = 0) -> bool:
    """Whether an int or numpy integer, no bool, of at least ``least``, that int64 can hold."""
    if isinstance(value, _BOOLS) or not isinstance(value, _INTEGERS):
        return False
    return bool(least <= value < 2**63)


def spec_of(op: str, name: str, layout: Layout | None) -> str:
    """The layout as an op argument; ``""`` if None.

    Raises:
        ArgumentError: not a Layout.
    """
    if layout is not None and not isinstance(layout, Layout):
        raise ArgumentError(f"{op}: {name} must be a Layout or None, got {layout!r}")
    return "" if layout is None else layout.spec


# By the names that they have as op arguments.
REDUCE_DTYPES: dict[str, torch.dtype | None] = {
    "": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def reduce_dtype_of(op: str, dtype: torch.dtype | None, q: Tensor) -> str:
    """The dtype that gradients travel in as an op argument; ``""`` if None.

    Raises:
        ArgumentError: none of those that sums of the gradients of q hold.
    """
    width = accumulation_dtype(q.dtype).itemsize
    fits = {name: d for name, d in REDUCE_DTYPES.items() if d is None or d.itemsize <= width}
    for name, each in fits.items():
        if dtype is each:
            return name
    known = ", ".join(map(str, fits.values()))
    raise ArgumentError(
        f"{op}: reduce_dtype must be one of {known} where q is {q.dtype}, got {dtype!r}"
    )


def kernel_of(op: str, kernel: str, use_cute: bool) -> str:
    """The kernel's name as an op argument.

    Raises:
        ArgumentError: no name, or another one than ``use_cute`` asks for.
    """
    if not isinstance(kernel, str):
        raise ArgumentError(f"{op}: kernel must be the name of one, or 'auto', got {kernel!r}")
    if not flag_of(op, "use_cute", use_cute):
        return kernel
    if kernel not in ("auto", "flash4"):
        raise ArgumentError(
            f"{op}: use_cute=True asks for kernel 'flash4', but kernel is {kernel!r}; give one"
        )
    return "flash4"


class Options(NamedTuple):
    """Arguments that every attention op takes alike, as the user passed them.

    Attributes:
        softmax_scale: what scores are multiplied by; None means 1 / sqrt(head dim).
        softcap: scores are kept in (-softcap, softcap) by a tanh; 0 is none.
        dropout_p, dropout_seed: the share of probabilities that become 0, and the seed of the
            generator, which draws by token and head: an int, an int64 tensor [1], or None to draw
            one from torch's generator.
        alibi_slopes: fp32 [h] or [b, h], or None.
        sink: [h] logits, or None.
        deterministic: whether gradients must be the same bit for bit from run to run; torch's own
            switch asks for it too.
        reduce_dtype: what gradients travel in; None: see ``core/executor.py``.
        use_cute: nnscaler's way to ask for flash-attn-4, kernel "flash4".
        q_rows, q_heads: which part of its rows or heads q is; None for all. See ``parts``.
        team_size: ranks that share out the heads of the same rows; None for the fastest.
    """

    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    return_lse: bool = False
    kernel: str = "auto"
    layout: Layout | None = None
    k_layout: Layout | None = None
    deterministic: bool = False
    reduce_dtype: torch.dtype | None = None
    use_cute: bool = False
    q_rows: tuple[int, int] | None = None
    q_heads: tuple[int, int] | None = None
    team_size: int | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    dropout_seed: int | Tensor | None = None

    @property
    def said(self) -> tuple[Any, ...]:
        """All but what may be tensors, which stand last."""
        return self[:-3]

    def tensors(self, op: str, q: Tensor) -> dict[str, Tensor | None]:
        """The optional tensors of the op; ``dropout_p`` must be sound.

        Raises:
            ArgumentError: one that does not fit q.
        """
        heads = q.shape[-2]
        return {
            "alibi_slopes": slopes_of(op, self.alibi_slopes, heads),
            "sink": sink_of(op, self.sink, heads),
            "dropout_seed": seed_of(op, self.dropout_seed, self.dropout_p, q),
        }

    def numbers(self, op: str, q: Tensor) -> dict[str, Any]:
        """The options of the op but its group, and which part of q it holds.

        Raises:
            ArgumentError: one that is out of range.
        """
        deterministic = flag_of(op, "deterministic", self.deterministic)
        return {
            "softmax_scale": scale_of(op, self.softmax_scale, q),
            "softcap": softcap_of(op, self.softcap),
            "dropout_p": dropout_of(op, self.dropout_p),
            "return_lse": flag_of(op, "return_lse", self.return_lse),
            "deterministic": deterministic or torch.are_deterministic_algorithms_enabled(),
            "reduce_dtype": reduce_dtype_of(op, self.reduce_dtype, q),
            "kernel": kernel_of(op, self.kernel, self.use_cute),
            "layout": spec_of(op, "layout", self.layout),
            "k_layout": spec_of(op, "k_layout", self.k_layout),
            "team_size": team_size_of(op, self.team_size),
        }


def _number(op: str, name: str, value: Any, fits: str = "a number") -> float:
    numeric = isinstance(value, int | float | np.integer | np.floating)
    if isinstance(value, bool) or not numeric:
        raise ArgumentError(f"{op}: {name} must be {fits}, got {value!r}")
    return float(value)


def tokens_of(op: str, name: str, count: int) -> int:
    """A number of tokens, 0 or more.

    Raises:
        ArgumentError: something else.
    """
    if not is_integer(count):
        raise ArgumentError(f"{op}: {name} must be a number of tokens, 0 or more, got {count!r}")
    return int(count)


def team_size_of(op: str, team_size: int | None) -> int:
    """The ranks that share out heads as an op argument; 0 if None.

    Raises:
        ArgumentError: not a number of 1 or more.
    """
    if team_size is not None and not is_integer(team_size, 1):
        raise ArgumentError(
            f"{op}: team_size must be a number of ranks, 1 or more, or None, got {team_size!r}"
        )
    return int(team_size or 0)


def check_team_size(op: str, team_size: int, ranks: int, q_heads: int) -> None:
    """A team must be a part of the group, with a query head for each of its ranks.

    Raises:
        ArgumentError: it is not; what would fit.
    """
    if not team_size or (ranks % team_size == 0 and team_size <= max(q_heads, 1)):
        return
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0 and n <= max(q_heads, 1)]
    raise ArgumentError(
        f"{op}: team_size={team_size} must divide the group's {ranks} ranks and be at most the "
        f"{q_heads} heads of q; {', '.join(map(str, fits))} would fit, or None"
    )


def softcap_of(op: str, softcap: float) -> float:
    """The cap of scores, 0 for none.

    Raises:
        ArgumentError: not a number, negative or not finite.
    """
    value = _number(op, "softcap", softcap)
    if not 0 <= value < math.inf:
        raise ArgumentError(f"{op}: softcap must be 0 (none) or above, got {softcap!r}")
    return value


def dropout_of(op: str, dropout_p: float) -> float:
    """The dropout probability.

    Raises:
        ArgumentError: not in [0, 1).
    """
    value = _number(op, "dropout_p", dropout_p)
    if not 0 <= value < 1:
        raise ArgumentError(f"{op}: dropout_p must be in [0, 1), got {dropout_p!r}")
    return value


def seed_of(op: str, seed: int | Tensor | None, dropout_p: float, q: Tensor) -> Tensor | None:
    """The seed of dropout as an int64 tensor of one element; drawn on q's device if None.

    Returns:
        None without dropout, which needs no seed.
    Raises:
        ArgumentError: neither an integer nor such a tensor, with dropout or without.
    """
    if isinstance(seed, Tensor):
        fits = seed.dtype == torch.int64 and seed.numel() == 1
    else:
        fits = seed is None or is_integer(seed, -(2**63))
    if not fits:
        raise ArgumentError(
            f"{op}: dropout_seed must be an int, an int64 tensor of one element or None, "
            f"got {seed!r}"
        )
    if not dropout_p:
        return None
    if seed is None:
        return torch.randint(2**62, (1,), dtype=torch.int64, device=q.device)
    if isinstance(seed, Tensor):
        return seed.reshape(1)
    return torch.tensor([int(seed)], dtype=torch.int64)


def slopes_of(op: str, slopes: Tensor | None, heads: int) -> Tensor | None:
    """ALiBi slopes [h] or [b, h], or None; the batch is checked against the annotation.

    Raises:
        ArgumentError: another shape or dtype, or slopes that require a gradient, which none gets.
    """
    if slopes is None:
        return None
    if not isinstance(slopes, Tensor) or not slopes.dtype.is_floating_point:
        raise ArgumentError(f"{op}: alibi_slopes must be a floating tensor, got {slopes!r}")
    if slopes.ndim not in (1, 2) or slopes.shape[-1] != heads:
        raise ArgumentError(
            f"{op}: alibi_slopes must be [h] or [b, h] with h = {heads} heads of q, got shape "
            f"{tuple(slopes.shape)}"
        )
    if slopes.requires_grad:
        raise ArgumentError(
            f"{op}: alibi_slopes require a gradient, which they do not get; pass slopes.detach()"
        )
    return slopes


def sink_of(op: str, sink: Tensor | None, heads: int) -> Tensor | None:
    """Sink logits [h], or None.

    Raises:
        ArgumentError: another shape or dtype.
    """
    if sink is None:
        return None
    if not isinstance(sink, Tensor) or not sink.dtype.is_floating_point:
        raise ArgumentError(f"{op}: sink must be a floating tensor [h] or None, got {sink!r}")
    if sink.shape != (heads,):
        raise ArgumentError(
            f"{op}: sink must hold a logit for each of the {heads} heads of q, shape ({heads},), "
            f"got {tuple(sink.shape)}"
        )
    return sink


def check_tensors(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k and v must be floating tensors of one dtype, on one device.

    Raises:
        ArgumentError: they are not.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise ArgumentError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise ArgumentError(f"{op}: {name} is {t.dtype} but q is {q.dtype}; give one dtype")
        if t.device != q.device:
            raise ArgumentError(f"{op}: {name} is on {t.device} but q is on {q.device}")
    if not q.dtype.is_floating_point:
        raise ArgumentError(f"{op}: q, k and v must be floating point, got {q.dtype}")


def check_heads(op: str, q: Tensor, k: Tensor) -> None:
    """Query heads must be a multiple of key heads (the dim before the last).

    Raises:
        ArgumentError: they are not.
    """
    h, g = int(q.shape[-2]), int(k.shape[-2])
    if (h % g) if g else h:
        raise ArgumentError(
            f"{op}: q has {h} heads and k has {g} (dim {q.ndim - 2} of {tuple(q.shape)} and "
            f"{tuple(k.shape)}); the heads of q must be a multiple of those of k"
        )


def checked(
    op: str,
    process_group: GroupLike,
    check: Callable[[], T],
    facts: Callable[[T], Mapping[str, str]] = lambda result: {},
) -> T:
    """``check()``; where ranks compare their calls, one whose check fails makes every rank raise.

    Args:
        facts: from the result to what must be the same on every rank, as text by name.
    Raises:
        Whatever ``check`` raises, or on its peers :class:`~.agreement.DisagreementError`; that on
        all ranks where they differ in ``facts``.
    """
    if torch.compiler.is_compiling() or not agreement.enabled(process_group):
        return check()
    try:
        result = check()
    except Exception as problem:  # whatever it is, the peers must not wait for this rank
        _tell_peers(op, process_group, {}, problem)
        raise
    _tell_peers(op, process_group, facts(result), None)
    return result


def _tell_peers(
    op: str, process_group: GroupLike, facts: Mapping[str, str], problem: Exception | None
) -> None:
    agreement.agree(op, comm_by_name(group_name(process_group)), facts, problem)
