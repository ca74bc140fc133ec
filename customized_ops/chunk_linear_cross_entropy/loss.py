"""Chunked linear cross entropy: what a user calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from annotations.codegen.public_call import PublicCall, declare_call
from annotations.groups import GroupError
from annotations.registry import OpRecord
from annotations.rules import SplitSite

from ..ring_attention.core.comm.comm_groups import FakeComm, GroupLike, comm_by_name, group_name
from ..ring_attention.op.arguments import ArgumentError, checked, flag_of, is_integer, require
from ..ring_attention.op.options import softcap_of
from .op import TITLE, count_tokens, first_row, token_losses

REDUCTIONS = ("mean", "sum", "none")


def chunk_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    *,
    bias: Tensor | None = None,
    reduction: str = "mean",
    softcap: float = 0.0,
    return_lse: bool = False,
    vocab_group: GroupLike = None,
    vocab_size: int | None = None,
    token_group: GroupLike = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``* l d^, v d^, * l, v -> * l, * l`` and a reduction of the first result over tokens

    ``cross_entropy(linear(hidden, weight, bias), target)`` with logits for one chunk of tokens at a
    time. The forward keeps two numbers a token, its loss and the log-sum-exp of its logits; the
    backward computes each chunk's logits again. Frozen inputs cost it nothing.

        logits, l = 4, v = 6      l cut over two ranks      v cut over two ranks
            x x x x x x           rank 0: x x x x x x       rank 0: x x x     rank 1: x x x
            x x x x x x  <-chunk          x x x x x x               x x x             x x x
            x x x x x x           rank 1: x x x x x x               x x x             x x x
            x x x x x x                   x x x x x x               x x x             x x x

    Args:
        hidden: [*, l, d], any strides; any number of leading dims.
        weight: [v, d]. bias: [v]; it may be -inf, for example where v is padded. Both in hidden's
            dtype: under torch.autocast give ``weight.to(hidden.dtype)``.
        target: int64 [*, l], rows of weight, or ``ignore_index``. Loss and gradients of any other
            target are NaN, on every device: raising would make the host wait for the device.
        ignore_index: the target of tokens that are left out. Their loss and its gradient are 0.
        reduction: ``"mean"`` over the tokens that count, ``"sum"``, or ``"none"``, which is what
            the function of this name in nnscaler's examples returns; it takes the same arguments by
            position. The mean of no tokens is 0 with gradients 0 (torch has NaN).
        softcap: logits are kept in (-softcap, softcap) by a tanh; 0 is none.
        chunk_size: tokens at a time; None chooses so that their logits are 512 MiB.
        return_lse: also return the log-sum-exp of each token's logits; gradients flow through it,
            so ``(lse ** 2).mean()`` is the z-loss. Tokens that are left out have one too.
        vocab_group: ranks over which v is cut: a ProcessGroup, its global ranks in increasing
            order, or None. hidden and target are the same on each of them.
        vocab_size: with ``vocab_group``, v over all its ranks. Rank r holds the r-th
            ceil(vocab_size / ranks) rows; the last ranks may hold fewer, or none.
        token_group: ranks over which tokens are cut, in any way; only for a mean. Each rank then
            returns its part of the mean: the sum over its tokens, divided by the number of tokens
            of all ranks. The parts add up to the mean; without a group each rank has the mean of
            its own tokens.

        Leave the last three at None under DTensor and under auto-parallelizers, which cut tokens or
        v themselves. Under DTensor all tensors are DTensors.
    Returns:
        A scalar, or [*, l] for ``"none"``, in fp32 (fp64 for fp64); with ``return_lse`` also lse
        [*, l], natural log. As in torch the loss is inf if the target's logit is -inf, and NaN if
        all logits are.

    Low precision: on GPUs gradients of logits are rounded to the inputs' dtype and products summed
    in fp32; on other devices everything is fp32. For fp16 they are first scaled by a power of two,
    so neither a mean over many tokens underflows here nor a large loss scale overflows. The
    returned gradients are fp16 again: small ones need a loss scale, as after any op.

    Communication: with v cut, the forward all-reduces three numbers a token, and every rank of
    vocab_group has the same loss. The backward adds up the gradient of hidden over vocab_group
    (under DTensor it is a partial sum); those of weight and bias stay with their rows. With tokens
    cut, the gradients of weight and bias are those of the rank's tokens: add up over token_group.

    Raises:
        ValueError: shapes, dtypes, groups or options do not fit; the message says what would.
            Raised before anything is computed or sent.
        NotImplementedError: a group is given under an auto-parallelizer that generates code.

    Wijmans et al.: Cut Your Losses in Large-Vocabulary Language Models, arXiv:2411.09009 (2024);
    the cut of v as in Shoeybi et al.: Megatron-LM, arXiv:1909.08053 (2019), section 3.
    """
    options = ignore_index, reduction, softcap, chunk_size, return_lse
    found = checked_losses(
        hidden, weight, target, bias, *options, vocab_group, vocab_size, token_group
    )
    loss = found[0] if isinstance(found, tuple) else found
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        if token_group is None:
            count = (target != ignore_index).sum()
        else:
            count = count_tokens(target, int(ignore_index), _name_of("token_group", token_group))
        loss = loss / count.clamp(min=1)
    return (loss, found[1]) if isinstance(found, tuple) else loss


def checked_losses(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    reduction: str,
    softcap: float,
    chunk_size: int | None,
    return_lse: bool,
    vocab_group: GroupLike,
    vocab_size: int | None,
    token_group: GroupLike,
    reduce_hidden: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """The loss of each token, [*, l], before any reduction; with ``return_lse`` also its lse. An
    engine that generates code sees this call in place of :func:`chunk_linear_cross_entropy`, whose
    arguments and errors it shares. (nnscaler cannot train end to end through a result that nobody
    uses, so lse is returned only on request.)

    Args:
        reduce_hidden: whether to add up the gradient of hidden over vocab_group here.
    """
    vocab_name = _name_of("vocab_group", vocab_group)
    _name_of("token_group", token_group)
    tensors = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}

    def check() -> tuple[int, float]:
        sharded = _check_tensors(hidden, {n: x for n, x in tensors.items() if x is not None})
        _check_options(ignore_index, reduction, chunk_size)
        flag_of(TITLE, "return_lse", return_lse)
        if not torch.compiler.is_compiling():
            token_losses.record.bind(tensors)
        _check_groups(sharded, reduction, vocab_group, vocab_size, token_group)
        return _rows_of_all(len(weight), vocab_group, vocab_size), softcap_of(TITLE, softcap)

    def facts(checked: tuple[int, float]) -> dict[str, str]:
        return {
            "hidden": f"{tuple(hidden.shape)} {hidden.dtype}",
            "vocab_size, softcap": str(checked),
            "ignore_index": str(ignore_index),
            "bias": "none" if bias is None else "given",
        }

    rows, cap = checked(TITLE, token_group, lambda: checked(TITLE, vocab_group, check, facts))
    numbers = int(ignore_index), cap, int(chunk_size or 0), rows, vocab_name, reduce_hidden
    loss, lse = token_losses(hidden, weight, target, bias, *numbers)
    return (loss, lse) if return_lse else loss


def _op(given: Mapping[str, Any]) -> tuple[OpRecord, dict[str, Any]]:
    for name in ("vocab_group", "token_group"):
        if given[name] is not None:
            raise NotImplementedError(
                f"{TITLE}: {name} is for calls without an engine, which cuts tokens or v as it "
                "likes; leave it None"
            )
    names = ("hidden", "weight", "target", "bias")
    return token_losses.record, {name: given[name] for name in names}


def _vocab_arguments(site: SplitSite) -> dict[str, Any]:
    # The engine itself adds up the gradients of hidden over the ranks.
    ranks = list(site.ranks)
    return {"vocab_group": ranks, "vocab_size": site.size, "reduce_hidden": False}


def _with_fake_peers(given: Mapping[str, Any], sites: Sequence[SplitSite]) -> dict[str, Any]:
    inside = next((site for site in sites if site.group), None)
    return {} if inside is None else {"vocab_group": FakeComm(0, inside.parts)}


declare_call(
    PublicCall(
        checked_losses,
        op=_op,
        outputs=lambda given: 2 if given["return_lse"] else 1,
        arguments=_vocab_arguments,
        fake_peers=_with_fake_peers,
    )
)


def _name_of(argument: str, group: GroupLike) -> str:
    try:
        return group_name(group)
    except GroupError as error:
        raise GroupError(f"{TITLE}: {argument}: {error}") from None


def _check_tensors(hidden: Any, given: Mapping[str, Any]) -> bool:
    """Check the tensors; returns whether they are DTensors."""
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise ArgumentError(f"{TITLE}: {name} must be a tensor, got {kind}")
        if tensor.device != hidden.device:
            where = f"{name} is on {tensor.device} but hidden is on {hidden.device}"
            raise ArgumentError(f"{TITLE}: {where}; give one device")
        if name != "target" and tensor.dtype != hidden.dtype:
            dtypes = f"{name} is {tensor.dtype} but hidden is {hidden.dtype}"
            raise ArgumentError(f"{TITLE}: {dtypes}; give one dtype, say {name}.to(hidden.dtype)")
    floating, target = hidden.dtype.is_floating_point, given["target"]
    require(floating, TITLE, "hidden", "floating point", hidden.dtype)
    require(target.dtype == torch.int64, TITLE, "target", "int64", target.dtype)
    plain = [name for name, tensor in given.items() if not isinstance(tensor, DTensor)]
    if plain and len(plain) < len(given):
        other = next(name for name in given if name not in plain)
        raise ArgumentError(
            f"{TITLE}: {plain[0]} is a plain tensor but {other} is a DTensor; give DTensors: "
            f"distribute_tensor({plain[0]}, {other}.device_mesh, placements)"
        )
    return not plain


def _check_options(ignore_index: object, reduction: object, chunk_size: object) -> None:
    require(is_integer(ignore_index, -(2**63)), TITLE, "ignore_index", "an integer", ignore_index)
    known = f"one of {', '.join(REDUCTIONS)}"
    require(reduction in REDUCTIONS, TITLE, "reduction", known, reduction)
    fits = chunk_size is None or is_integer(chunk_size, 1)
    what = "None or a number of tokens, 1 or more"
    require(fits, TITLE, "chunk_size", what, chunk_size)


def _check_groups(
    sharded: bool,
    reduction: str,
    vocab_group: GroupLike,
    vocab_size: int | None,
    token_group: GroupLike,
) -> None:
    for name, group in (("vocab_group", vocab_group), ("token_group", token_group)):
        if sharded and group is not None:
            raise ArgumentError(
                f"{TITLE}: {name} goes with plain tensors; DTensors know over which ranks they are "
                "cut, leave it None"
            )
    if token_group is not None and reduction != "mean":
        raise ArgumentError(
            f"{TITLE}: token_group goes with reduction='mean'; reduction={reduction!r} needs "
            "nothing from other ranks, leave it None"
        )
    if (vocab_group is None) != (vocab_size is None):
        raise ArgumentError(
            f"{TITLE}: vocab_group and vocab_size go together: the ranks that hold the weight's "
            f"rows, and how many rows they hold in all; got vocab_size={vocab_size!r} with "
            f"{'no' if vocab_group is None else 'a'} vocab_group"
        )


def _rows_of_all(rows: int, vocab_group: GroupLike, vocab_size: int | None) -> int:
    """The rows of the whole weight, of which this rank holds ``rows``."""
    if vocab_size is None:
        if not rows:
            raise ArgumentError(f"{TITLE}: weight has no rows; give [v, d] with v of 1 or more")
        return rows
    require(is_integer(vocab_size, 1), TITLE, "vocab_size", "1 or more", vocab_size)
    if not torch.compiler.is_compiling():  # in a graph only the op checks
        first_row(rows, int(vocab_size), comm_by_name(group_name(vocab_group)))
    return int(vocab_size)
