"""The eager entry point: a user's call, checked once and from then on found by what it passes.

    the first call of its kind    is checked, made an AttentionCall, and bound (:mod:`.bound`)
    one of other documents        is bound as the last one of its kind, if it was planned ahead;
                                  if not, only its documents and layouts are checked
    the next ones                 are one look-up, the executor, and autograd

Where the ranks of a group compare their calls, every call is checked and compared, and only its
plan and kernel are looked up.

Calls that somebody watches or traces (torch.compile, modes, profilers, subclasses such as DTensor)
go through the op in the graph instead (:mod:`.graph`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from annotations.library.autograd import recorder
from annotations.library.bypass import can_bypass_dispatcher, gradients_can_bypass
from annotations.library.cached_calls import cached, typed_key

from ..core.comm import Comm
from ..core.comm.comm_groups import GroupLike, comm_by_name, group_name
from ..core.comm.inprocess import InProcessComm
from ..core.layout import Layout
from .arguments import (
    ArgumentError,
    check_tensors,
    checked,
    compares_calls,
    refuse_attn_probs,
    ring_group,
)
from .bound import MOST_BOUND, BoundCall, bind, bound_calls, bound_like
from .call import AttentionCall, AttentionOp
from .mask_source import MaskSource
from .options import LAYOUTS, OP_OPTIONS, OPTIONAL_TENSORS, OpOptions, Options, SharedOptions
from .query_shards import refuse_with_parts
from .tokens.call_layouts import refuse_layouts_of_ranks

T = TypeVar("T")
_SHARED = frozenset(SharedOptions.__annotations__)


class UserCall(NamedTuple):
    """A call of an attention function as the user passed it, not yet checked."""

    op: AttentionOp
    q: Tensor
    k: Tensor
    v: Tensor
    source: MaskSource
    group: GroupLike
    options: Options
    return_attn_probs: bool


class ValidCall(NamedTuple):
    """The checked arguments of a :class:`UserCall`, as the op takes them: integer tensors and
    numbers of its mask source, optional tensors, options."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    optional: list[Tensor | None]
    options: OpOptions

    def attention_call(self, op: AttentionOp, qkv: tuple[Tensor, Tensor, Tensor]) -> AttentionCall:
        """The same as a value, without data."""
        source = op.source.decode({**self.tensors, **self.numbers})
        return AttentionCall.of(op, qkv, source, self.options, self.optional)


def attend(
    op: AttentionOp,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    source: MaskSource,
    process_group: GroupLike,
    own: tuple[Any, ...],
    shared: SharedOptions,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Make a user's call of an attention function: out, and lse if asked for.

    Args:
        source: which pairs attend, as the user said.
        own: the options that the function names, the first of :class:`~.options.Options`.
        shared: what it takes as ``**options``.
    """
    group = ring_group(source.enable_ring, process_group)
    if not shared.keys() <= _SHARED:
        checked(op.title, group, partial(_refuse_unknown, op.title, shared))
    options = Options(*own, **shared)
    call = UserCall(op, q, k, v, source, group, options, return_attn_probs)
    optional = options.alibi_slopes, options.sink, options.dropout_seed
    tensors = [t for t in optional if isinstance(t, Tensor)]
    if torch.compiler.is_compiling() or not can_bypass_dispatcher(q, k, v, *tensors):
        valid = _checked(call)
        given = (*valid.tensors.values(), *valid.optional, *valid.numbers.values(), *valid.options)
        out, lse = op.record.forward(q, k, v, *given, group_name(group))
    else:
        out, lse = _attend_eagerly(call)
    return (out, lse) if options.return_lse else out


def _refuse_unknown(op: str, shared: SharedOptions) -> None:
    unknown = next(name for name in shared if name not in _SHARED)
    raise TypeError(f"{op}() got an unexpected keyword argument {unknown!r}")


def _attend_eagerly(call: UserCall) -> tuple[Tensor, Tensor]:
    op, q, k, v, _, group, options, _ = call
    name = group_name(group)
    comm = comm_by_name(name)
    compared = group is not None and compares_calls(group)
    key = None if compared else _key(call)
    bound = None if key is None else _known(bound_calls(comm), key)
    like = None
    if bound is None and key is not None:
        like = _known(_of_kinds.get(comm, {}), key[0])
        bound = like and _bound_ahead(call, comm, like)
        if bound is not None:
            _keep(comm, key, bound)
    if bound is not None:
        optional = _optional_tensors(op.title, q, options)
    else:
        valid = _checked(call) if like is None else _valid(call, like)
        optional = valid.optional
        made = partial(valid.attention_call, op, (q, k, v))
        bound = bind(op, made, optional, comm, compare=True)
        if key is not None and not bound.keeps_group:
            _keep(comm, key, bound)
    tensors = q, k, v, *optional
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        run, gradients = partial(bound.forward, comm), partial(_gradients, bound, comm, name)
        results: tuple[Tensor, Tensor]
        results = recorder(op.name).fast_apply(run, gradients, True, *tensors)
        return results
    with torch._C._AutoDispatchBelowAutograd():
        return bound.forward(comm, tensors)


def _gradients(
    bound: BoundCall, comm: Comm, name: str, grads: Any, saved: Any, needed: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, the slopes, the sink and the seed."""
    if gradients_can_bypass(grads):
        found = bound.backward(comm, grads, saved)
        dq, dk, dv, dsink = (None if grad is None else grad.contiguous() for grad in found)
    else:  # watched, or to be differentiated again, which the op refuses
        q, k, v, *optional, out, lse = saved
        tensors, numbers = bound.call.encode()
        given = (*grads, q, k, v, *tensors, *optional, *numbers, name, out, lse)
        dq, dk, dv, dsink = bound.call.op.record.backward(*given)
    return dq, dk, dv, None, dsink if needed[4] else None, None


def _key(call: UserCall) -> tuple[Any, Any] | None:
    """A key of all that was passed, with types: tensors without their data. Its second part is what
    may be new in every step, documents and layouts. None where something has no key."""
    op, q, k, v, source, _, options, probs = call
    key = source.key()
    slopes, *_, sink, seed = options
    optional: list[Any] = [None, None, None]
    for n, t in enumerate((slopes, sink, seed)):
        if t is None:
            continue
        if isinstance(t, Tensor):
            optional[n] = t.shape, t.dtype, t.device, t.requires_grad
        elif n == 2 and type(t) is int:
            optional[n] = int
        else:
            return None
    if key is None:
        return None
    said, documents = key
    shapes, dtypes = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype)
    devices = q.device, k.device, v.device
    deterministic = torch.are_deterministic_algorithms_enabled()
    given = typed_key((*_NUMBERS_OF(options), probs)), *optional, deterministic
    kind = op.name, shapes, dtypes, devices, said, *given
    return kind, (documents, options.layout, options.k_layout)


# The options of a call that are no tensors, and are the same in every step.
_NUMBERS_OF = attrgetter(*(n for n in Options._fields if n not in {*OPTIONAL_TENSORS, *LAYOUTS}))


def _known(found: Mapping[Any, T], key: Any) -> T | None:
    try:
        return found.get(key)
    except TypeError:  # something in it has no hash, which the checks will report
        return None


# The last bound call of each kind, by group.
_of_kinds: WeakKeyDictionary[Comm, dict[Any, BoundCall]] = WeakKeyDictionary()


def _bound_ahead(call: UserCall, comm: Comm, like: BoundCall) -> BoundCall | None:
    """The bound call of documents whose plan was made ahead, given one of the same kind."""
    layout, k_layout = call.options.layout, call.options.k_layout
    if not isinstance(layout, Layout) or k_layout is not None:
        return None
    return bound_like(like, call.source, layout, comm)


def _valid(call: UserCall, like: BoundCall) -> ValidCall:
    """The checked call, given one of the same kind: only documents and layouts are new."""
    op, q, _, _, source, _, options, _ = call
    tensors, numbers = source.encode(op.title)
    known = like.call.options._replace(**options.layouts(op.title))
    return ValidCall(tensors, numbers, _optional_tensors(op.title, q, options), known)


def _keep(comm: Comm, key: tuple[Any, Any], bound: BoundCall) -> None:
    """Let the next calls of this key, and of its kind, find a bound call."""
    cached(bound_calls(comm), key, lambda: bound, 2 * MOST_BOUND)
    kinds, kind = _of_kinds.setdefault(comm, {}), key[0]
    if _known(kinds, kind) is not None:
        kinds.pop(kind, None)
    cached(kinds, kind, lambda: bound, MOST_BOUND)


def _optional_tensors(title: str, q: Tensor, options: Options) -> list[Tensor | None]:
    slopes, sink, seed = options.alibi_slopes, options.sink, options.dropout_seed
    if slopes is None and sink is None and seed is None and not options.dropout_p:
        return [None, None, None]
    return list(options.tensors(title, q).values())


def _checked(call: UserCall) -> ValidCall:
    """Check a call. Where ranks compare calls, an error on one rank raises on all."""
    op, q, k, v, source, group, options, probs = call
    title = op.title

    def check() -> ValidCall:
        refuse_attn_probs(title, probs)
        check_tensors(title, q, k, v)
        tensors, numbers = source.encode(title)
        nothing = dict.fromkeys(OPTIONAL_TENSORS)
        given = {"q": q, "k": k, "v": v, **tensors, **nothing, **numbers}
        given |= {**dict.fromkeys(OP_OPTIONS), **options.parts(title, q)}
        traced = torch.compiler.is_compiling()
        if not traced:  # shapes first: the rest is checked against them
            op.record.bind(given)
        valid = options.checked(title, q)
        refuse_with_parts(title, valid, ranks=1)
        if traced and not valid.row_parts and not group_name(group):
            refuse_layouts_of_ranks(title, layout=options.layout, k_layout=options.k_layout)
        optional = options.tensors(title, q)
        if not traced and any(t is not None for t in optional.values()):
            op.record.bind({**given, **optional})
        threads = isinstance(group, InProcessComm) and group.size > 1
        if options.dropout_p and options.dropout_seed is None and threads:
            raise ArgumentError(
                f"{title}: ranks that are threads share one generator, so each would draw another "
                "seed; give dropout_seed"
            )
        return ValidCall(tensors, numbers, list(optional.values()), valid)

    return checked(title, group, check)
