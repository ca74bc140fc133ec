"""How others see the public functions and values: engines that generate code cut calls, and
torch.compile leaves masks, layouts and plans alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from annotations.after_import import COMPILER, call_with
from annotations.codegen.public_call import PublicCall, declare_call, qualified, without_data
from annotations.registry import OpRecord
from annotations.rules import SplitSite

from .core.comm.comm_groups import FakeComm
from .core.layout import Layout
from .core.mask import AttnMask
from .core.plan import Plan
from .core.plan import make_plan as make_plan_uncompiled
from .layout_ops import (
    wrap_roll_func,
    wrap_shard_func,
    wrap_shuffle_func,
    wrap_unshard_func,
    wrap_unshuffle_func,
)
from .masked_attn import MASKED_ATTN, wrap_masked_attn_func
from .maybe_shuffle import (
    layout_by_document,
    shuffle_documents,
    wrap_maybe_shuffle,
    wrap_maybe_unshuffle,
)
from .op.arguments import refuse_attn_probs
from .op.call import AttentionOp
from .op.mask_source import Arguments
from .op.options import Options, reduce_dtype_of
from .op.tokens.call_layouts import BY_DOCUMENT, layout_named, refuse_layouts_of_ranks
from .op.tokens.order_ops import UNKNOWN, WHOLE, move_tokens
from .ring_attn import RING_ATTN, wrap_ring_attn_func
from .ring_attn_varlen import RING_ATTN_VARLEN, wrap_ring_attn_varlen_func
from .sliding_window_attn import (
    SLIDING_WINDOW_ATTN,
    SLIDING_WINDOW_ATTN_VARLEN,
    wrap_sliding_window_attn_func,
)
from .streaming_attn import STREAMING_ATTN, STREAMING_ATTN_VARLEN, wrap_streaming_attn_func
from .zigzag_allgather_attn_varlen import (
    ZIGZAG_ALLGATHER_ATTN_VARLEN,
    wrap_zigzag_allgather_attn_varlen_func,
)
from .zigzag_attn import ZIGZAG_ATTN, wrap_zigzag_attn_func

T = TypeVar("T")


def _attention(
    function: Callable[..., Any],
    dense: AttentionOp | None,
    packed: AttentionOp | None = None,
    *,
    whole_keys: bool = False,
) -> PublicCall:
    """The declaration of an attention function, which is a different op with ``cu_seqlens``.

    Args:
        whole_keys: whether the function itself asks for whole k and v, as ``q_rows=(0, 1)`` does.
    """

    def op(given: Arguments) -> tuple[OpRecord, Arguments]:
        if whole_keys and given["q_rows"] is None:
            given = {**given, "q_rows": (0, 1)}
        _refuse_without_ring(function, given)
        refuse_layouts(function, given)
        refuse_attn_probs(function.__name__, given.get("return_attn_probs", False))
        lengths = given.get("cu_seqlens_q", given.get("cu_seqlens"))
        chosen = packed if dense is None or lengths is not None else dense
        assert chosen is not None
        return chosen.record, _op_arguments(chosen, given)

    return PublicCall(
        function,
        op,
        outputs=lambda given: 2 if given["return_lse"] else 1,
        arguments=_attention_arguments,
        fake_peers=_attention_with_fake_peers,
        names={"cu_seqlens": "cu_seqlens_q"},
        follow=layout_code,
    )


def _op_arguments(op: AttentionOp, given: Arguments) -> Arguments:
    """The op's arguments that its annotation depends on, from the arguments of a call."""
    arguments = {name: value for name, value in given.items() if name in op.arguments}
    for name in op.source.lengths:
        arguments[name] = _as_tensor(given.get(name, given.get("cu_seqlens")))
    if isinstance(given.get("mask"), AttnMask):
        arguments["mask_slices"] = without_data((len(given["mask"].slices), 6), torch.int64)
    if isinstance(given["dropout_seed"], int):
        arguments["dropout_seed"] = without_data((1,), torch.int64)
    options = Options(**{name: given[name] for name in Options._fields if name in given})
    arguments |= options.parts(op.title, given["q"])
    arguments["reduce_dtype"] = reduce_dtype_of(op.title, given["reduce_dtype"], given["q"])
    arguments["team_size"] = given.get("team_size") or 0
    return arguments


def _attention_with_fake_peers(given: Arguments, sites: Sequence[SplitSite]) -> Arguments:
    """Arguments that make the call the last part, which has the most work in causal attention."""
    parts = {site.identifier: site.parts for site in sites}
    changed = dict(with_fake_group(given, sites))
    if "lq" in parts:
        changed["q_rows"] = (parts["lq"] - 1, parts["lq"])
    keys = given["k"].shape[0] * parts.get("l", 1)
    rows = given["q"].shape[0] * parts.get("l", parts.get("lq", 1))
    return {**changed, **one_document(given, rows, keys)}


def _as_tensor(lengths: Any) -> Tensor | None:
    """Lengths as an op takes them: lists and arrays become tensors, here without data."""
    if lengths is None or isinstance(lengths, Tensor):
        return lengths
    return without_data((len(lengths),), torch.int64)


def one_document(given: Arguments, rows: int, keys: int) -> dict[str, Any]:
    """Document lengths are known only at run time, so all tokens are taken to be one document."""
    tokens = {"cu_seqlens_q": rows, "cu_seqlens_k": keys, "cu_seqlens": rows}
    changed: dict[str, Any] = {
        name: cu.new_tensor([0] * (len(cu) - 1) + [tokens[name]])
        for name in tokens
        if isinstance(cu := given.get(name), Tensor)
    }
    if changed:  # the document is then longer than the call's max_seqlen, which may be left out
        changed |= {name: None for name in ("max_seqlen_q", "max_seqlen_k") if name in given}
    return changed


def _attention_arguments(site: SplitSite) -> Arguments:
    """The arguments that tell a call its part; on one rank any layout is the contiguous one."""
    if site.group:
        return {"process_group": list(site.ranks), "layout": None, "k_layout": None}
    return {{"lq": "q_rows", "qh": "q_heads"}[site.identifier]: (site.index, site.parts)}


def layout_code(order: str, site: SplitSite, code: Mapping[str, str]) -> dict[str, str]:
    """The code of ``layout=``; by document, it is made of the call's own cu_seqlens."""
    if order != BY_DOCUMENT:
        return {"layout": f"{qualified(layout_named)}({order!r}, {site.size}, {site.parts})"}
    cu_seqlens = code.get("cu_seqlens_q") or code["cu_seqlens"]
    return {"layout": f"{qualified(layout_by_document)}({cu_seqlens}, {site.parts})"}


def _move(
    function: Callable[..., Any],
    source: str | None,
    target: str | None,
    when_cut: Callable[..., Any] | None = None,
) -> PublicCall:
    """The declaration of a function that moves tokens; None stands for its ``layout`` argument."""

    def op(given: Arguments) -> tuple[OpRecord, Arguments]:
        layout = given["layout"]
        spec = layout.spec if isinstance(layout, Layout) else layout
        return move_tokens.record, {
            "x": given["x"],
            "source": spec if source is None else source,
            "target": spec if target is None else target,
            "shift": given.get("shifts", 0),
            "dim": given["dim"],
            "group": "",
            "total": UNKNOWN,
        }

    return PublicCall(function, op, lambda given: 1, _group_only, when_cut, with_fake_group)


def _documents(function: Callable[..., Any]) -> PublicCall:
    def op(given: Arguments) -> tuple[OpRecord, Arguments]:
        _refuse_without_ring(function, given)
        cu = _as_tensor(given["cu_seqlens"])
        back = function is wrap_maybe_unshuffle
        return shuffle_documents.record, {**given, "cu_seqlens": cu, "back": back}

    def with_fake_peers(given: Arguments, sites: Sequence[SplitSite]) -> Arguments:
        parts = next((site.parts for site in sites if site.group), 1)
        tokens = given["hidden_states"].shape[0] * parts
        return {**with_fake_group(given, sites), **one_document(given, tokens, tokens)}

    return PublicCall(function, op, lambda given: 1, _group_only, fake_peers=with_fake_peers)


def _group_only(site: SplitSite) -> Arguments:
    return {"process_group": list(site.ranks)}


def with_fake_group(given: Arguments, sites: Sequence[SplitSite]) -> Arguments:
    inside = next((site for site in sites if site.group), None)
    return {} if inside is None else {"process_group": FakeComm(inside.parts - 1, inside.parts)}


def refuse_layouts(function: Callable[..., Any], given: Arguments) -> None:
    """Refuse other layouts: tokens are in natural order, or in the order of an earlier shuffle."""
    layouts = {name: given.get(name) for name in ("layout", "k_layout")}
    refuse_layouts_of_ranks(function.__name__, **layouts)
    for name, layout in layouts.items():
        if layout is not None and layout != Layout.contiguous(layout.total, 1):
            raise NotImplementedError(
                f"{function.__name__}: {name}={layout} is another order than natural, which no "
                "generated code carries; use wrap_shuffle_func or wrap_maybe_shuffle"
            )


def _refuse_without_ring(function: Callable[..., Any], given: Arguments) -> None:
    if given.get("enable_ring") is False:
        raise NotImplementedError(
            f"{function.__name__}: enable_ring=False is not supported in a captured graph, where "
            "an engine gives the op its group"
        )


for _call in (
    _attention(wrap_ring_attn_func, RING_ATTN),
    _attention(wrap_zigzag_attn_func, ZIGZAG_ATTN),
    _attention(wrap_ring_attn_varlen_func, None, RING_ATTN_VARLEN),
    _attention(
        wrap_zigzag_allgather_attn_varlen_func,
        None,
        ZIGZAG_ALLGATHER_ATTN_VARLEN,
        whole_keys=True,
    ),
    _attention(wrap_sliding_window_attn_func, SLIDING_WINDOW_ATTN, SLIDING_WINDOW_ATTN_VARLEN),
    _attention(wrap_streaming_attn_func, STREAMING_ATTN, STREAMING_ATTN_VARLEN),
    _attention(wrap_masked_attn_func, MASKED_ATTN),
    _move(wrap_shuffle_func, "contiguous", None),
    _move(wrap_unshuffle_func, None, "contiguous"),
    _move(wrap_shard_func, WHOLE, None, when_cut=wrap_shuffle_func),
    _move(wrap_unshard_func, None, WHOLE, when_cut=wrap_unshuffle_func),
    _move(wrap_roll_func, None, None),
    _documents(wrap_maybe_shuffle),
    _documents(wrap_maybe_unshuffle),
):
    declare_call(_call)


# Masks, layouts and plans are made with numpy, and never in a graph of torch.compile.
_REASON = "masks, layouts and plans are numpy's: make and read them outside of a compiled graph"


def _left_alone(function: Callable[..., T]) -> Callable[..., T]:
    from torch._dynamo.eval_frame import skip_code

    disabled: Any = torch.compiler.disable(function, reason=_REASON)

    def call(*args: Any, **kwargs: Any) -> T:
        # While one thread exports, torch would note in its trace what any other thread calls.
        return (function if torch.compiler.is_exporting() else disabled)(*args, **kwargs)

    skip_code(call.__code__)
    return wraps(disabled)(call)


def _leave_alone(cls: type, *methods: str) -> None:
    """Have the compiler break its graph, or say why it cannot, where a class, its class and static
    methods, or ``methods`` (or properties) are called. This is done here and not where the class is
    declared, because planning needs no torch."""
    for name in dir(cls):
        static = inspect.getattr_static(cls, name)
        if isinstance(static, classmethod | staticmethod) and not name.startswith("_"):
            setattr(cls, name, type(static)(_left_alone(static.__func__)))
    for name in ("__init__", *methods):
        static = inspect.getattr_static(cls, name)
        if isinstance(static, property):
            assert static.fget is not None
            setattr(cls, name, property(_left_alone(static.fget), doc=static.__doc__))
        else:
            setattr(cls, name, _left_alone(static))


@wraps(make_plan_uncompiled)
def make_plan(*args: Any, **kwargs: Any) -> Plan:
    return _make_plan(*args, **kwargs)


_make_plan = make_plan_uncompiled


def _tell_the_compiler() -> None:
    global _make_plan
    _leave_alone(AttnMask, "union", "shift", "restrict", "area", "to_dense", "picture")
    _leave_alone(Layout, "positions")
    _make_plan = _left_alone(make_plan_uncompiled)


call_with(COMPILER, _tell_the_compiler)
