"""``verify=True``: compares a parallel module with the module alone, and names the op that differs.

results and gradients of one step --differ--> each op by itself, on the inputs that it has alone
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from annotations.registry import record_of

from ..capture.nodes import is_getitem, module_of, resolve, tensor_inputs, with_inputs
from ..capture.replaced_parameters import call_in_dtype, cast
from ..run.execute import Program

# The largest difference allowed, as a share of the largest value: summing in another order costs as
# much. For a gradient, that value is at least NOISE times the largest of all gradients: one that is
# 0 but for rounding (of a bias of keys, say) holds nothing but rounding errors.
NOISE = 1e-3
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class VerificationError(ValueError):
    """A parallel module computes something other than the module alone."""


def same_as_alone(parallel: Any, alone: torch.nn.Module, example: Mapping[str, Any]) -> None:
    """Compare results and every gradient of one step; leaves no gradients behind. Raises on every
    rank, naming the first that differs and by how much."""
    if parallel.draws:
        raise VerificationError(
            "verify=True cannot compare a module that drops elements at random: call .eval() first"
        )
    dtype, copies = parallel.compute_dtype, parallel.compute_config.num_scale_units
    want, want_grads = _step(alone, example, lambda: None, dtype)
    got, got_grads = _step(parallel, example, parallel.sync_grad)
    # Every copy had the same batch, and their gradients were added up.
    grads = [(name, got_grads.get(name), grad) for name, grad in want_grads.items()]
    mine = _first_difference(zip(got, want, strict=True), grads, dtype, copies)
    first: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(first, mine)
    wrong = [f"rank {rank}: {text}" for rank, text in enumerate(first) if text]
    if wrong:
        program, flat_inputs = parallel.planned_for(example)
        op = _wrong_op(program, flat_inputs, alone) or "each op by itself is right"
        dist.all_gather_object(first, op)
        raise VerificationError(
            f"the parallel module differs from the one alone; {wrong[0]}; {first[0]}"
        )


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


def _first_difference(
    results: Iterable[tuple[Any, Any]],
    grads: Sequence[tuple[str, Any, Any]],
    dtype: torch.dtype | None = None,
    copies: int = 1,
) -> str:
    """The first difference, as text, between found and expected results, and then gradients by
    name. All are compared, since making a DTensor whole is a collective."""
    texts = [_differing(f"result {n}", a, b, dtype) for n, (a, b) in enumerate(results)]
    every = (g for *_, g in grads if g is not None and g.numel())
    largest = max((g.abs().max().item() for g in every), default=0.0)
    for name, got, want in grads:
        what = f"the gradient of {name}"
        texts.append(_differing(what, got, want, dtype, copies, NOISE * largest))
    return next(filter(None, texts), "")


def _differing(
    what: str, got: Any, want: Any, dtype: torch.dtype | None, copies: int = 1, least: float = 0.0
) -> str:
    """What is wrong, as text; empty if nothing is. ``dtype`` is what is computed in, if not
    ``want``'s. ``got`` should be ``copies`` times ``want``. ``least`` is the smallest that the
    largest value of ``want`` is taken to be."""
    if want is None or got is None:
        none = "there is none" if got is None else "there should be none"
        nothing = all(x is None or not x.any() for x in (got, want))
        return "" if nothing else f"{what}: {none}"
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    if not want.numel() and not whole.numel():
        return ""
    difference = (whole.detach() / copies - want).abs().max()
    allowed = TOLERANCE.get(dtype or want.dtype, 1e-3) * want.abs().max().clamp(min=least)
    if bool(difference <= allowed):  # False for NaN
        return ""
    return f"{what} differs by up to {difference:.3e}, of values up to {want.abs().max():.3e}"


def _wrong_op(program: Program, flat_inputs: list[Any], alone: torch.nn.Module) -> str:
    """The first op whose results or gradients differ when it is cut, though it gets the inputs that
    it has in the module alone; empty if there is none. All ranks compare all ops."""
    captured, found = program.captured, ""
    values: dict[tuple[Node, int], Any] = {}
    given = program.given(lambda name: attrgetter(name)(alone), flat_inputs)
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            value: Any = given.get(node.name)
            read = node.name in captured.attributes
            values[node, 0] = cast(value, program.compute_dtype) if read else value
        elif node.op == "call_function" and not is_getitem(node):
            results, text = _op_by_itself(program, node, values)
            values.update({(node, n): result for n, result in enumerate(results)})
            found = found or text
    return found


def _op_by_itself(
    program: Program, node: Node, values: Mapping[tuple[Node, int], Any]
) -> tuple[Sequence[Any], str]:
    """What an op returns when it is not cut; and how it differs when it is cut, if it does."""

    def leaves() -> dict[tuple[Node, int], Tensor]:
        own = {key: values[key].detach() for key in map(resolve, tensor_inputs(node))}
        return {k: x.requires_grad_(x.is_floating_point()) for k, x in own.items()}

    plain, cut = leaves(), leaves()
    args, kwargs = with_inputs(node, lambda x, _: plain[resolve(x)])
    returned = node.target(*args, **kwargs)  # type: ignore[operator]
    want: Sequence[Any] = (returned,) if isinstance(returned, Tensor) else tuple(returned)
    got = program.one(node, cut)
    names = [source.name for source, _ in plain]
    grads = list(zip(names, _gradients(got, cut), _gradients(want, plain), strict=True))
    pairs = list(zip(got, want, strict=True))
    if not isinstance(returned, Tensor):  # unused results are for the backward, in its own form
        pairs = [pairs[n] for n in sorted({int(user.args[1]) for user in node.users})]  # type: ignore[call-overload, arg-type]
    text = _first_difference(pairs, grads)
    record = record_of(node.target)
    title = str(node.target) if record is None else record.title
    where = f"{node.name} ({title} in {module_of(node) or 'the module'})"
    return want, f"of {where} by itself {text}" if text else ""


def _gradients(
    results: Sequence[Any], inputs: Mapping[tuple[Node, int], Tensor]
) -> Sequence[Tensor | None]:
    """The gradient of each input, for gradients of the results that are the same in every run."""
    flowing = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    asked = [x for x in inputs.values() if x.requires_grad]
    if not flowing or not asked:
        return [None] * len(inputs)
    given = [
        torch.arange(x.numel(), device=x.device).double().cos().to(x.dtype).view(x.shape)
        for x in flowing
    ]
    found = iter(torch.autograd.grad(flowing, asked, given, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs.values()]
