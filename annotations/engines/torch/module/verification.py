"""One step in parallel against the same step of the module alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from .parameters import call_in_dtype

# Largest difference, as a share of the largest value: summing in another order costs so much. Of
# gradients that are smaller than NOISE of the model's largest, as a share of that: a gradient that
# is 0 but for rounding (of a bias of keys, say) is nothing but that.
NOISE = 1e-3
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class VerificationError(ValueError):
    """A parallel module computes something else than the module alone."""


def same_as_alone(parallel: Any, alone: torch.nn.Module, example: Mapping[str, Any]) -> None:
    """Compare results and every gradient of one step; leaves no gradients behind.

    Raises:
        VerificationError: names the first that differs and by how much, on every rank.
    """
    if parallel.draws:
        raise VerificationError(
            "verify=True cannot compare a module that drops elements at random: call .eval() first"
        )
    dtype, copies = parallel.compute_dtype, parallel.compute_config.num_scale_units
    want, want_grads = _step(alone, example, lambda: None, dtype)
    got, got_grads = _step(parallel, example, parallel.sync_grad)
    pairs = zip(got, want, strict=True)
    found = [_differing(f"result {n}", a, b, dtype) for n, (a, b) in enumerate(pairs)]
    largest = max((g.abs().max().item() for g in want_grads.values() if g is not None), default=0.0)
    # All are compared, since ranks meet to make a gradient whole. Every copy had the same batch,
    # and their gradients were added up.
    for name, grad in want_grads.items():
        what = f"the gradient of {name}"
        found.append(_differing(what, got_grads.get(name), grad, dtype, copies, NOISE * largest))
    first: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(first, next(filter(None, found), ""))
    wrong = [f"rank {rank}: {text}" for rank, text in enumerate(first) if text]
    if wrong:
        raise VerificationError("the parallel module differs from the one alone; " + wrong[0])


def _step(
    module: Any, example: Mapping[str, Any], sync: Any, dtype: torch.dtype | None = None
) -> tuple[list[Tensor], dict[str, Any]]:
    """Floating results and gradients of one step."""
    results = pytree.tree_leaves(call_in_dtype(module, dtype, (), copy.deepcopy(dict(example))))
    floating = [x for x in results if isinstance(x, Tensor) and x.is_floating_point()]
    losses = [x if x.ndim == 0 else x.square().sum() for x in floating if x.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
        sync()
    grads = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    return floating, grads


def _differing(
    what: str,
    got: Any,
    want: Any,
    dtype: torch.dtype | None,
    copies: int = 1,
    least: float = 0.0,
) -> str:
    """What is wrong, empty if nothing.

    Args:
        dtype: what is computed in, if not ``want``'s. copies: how often ``want`` is in ``got``.
        least: what the largest value counts as at least.
    """
    if want is None or got is None:
        none = "there is none" if got is None else "there should be none"
        nothing = all(x is None or not x.abs().max() for x in (got, want))
        return "" if nothing else f"{what}: {none}"
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    difference = (whole.detach() / copies - want).abs().max()
    allowed = TOLERANCE.get(dtype or want.dtype, 1e-3) * want.abs().max().clamp(min=least)
    if bool(difference <= allowed):  # False for NaN
        return ""
    return f"{what} differs by up to {difference:.3e}, of values up to {want.abs().max():.3e}"
