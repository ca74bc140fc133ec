"""Jobs for the DTensor tests; see ``ranks.Pool``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from op_cases import Case
from own_ops.group_norm import SumOverRanks
from rank_groups import device
from steps import refusal, whole
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from annotations import group_named, register_op
from annotations.rules import Communicates, InnerCost, PartitionRule, SplitSite, Told
from customized_ops.ring_attention import wrap_ring_attn_varlen_func

# Where each tensor lies, one letter or digit a mesh axis: "0", "R", "1R"; "-" is a plain tensor.
Places = Sequence[str]


@register_op("m k+, k+ n -> m n", name="dtensortest::matmul")
def matmul(x: Tensor, w: Tensor) -> Tensor:
    """All kinds of splits: m and n are spatial, k is summed."""
    return x @ w


@register_op("m k, n -> m k, m n", name="dtensortest::two")
def two(x: Tensor, w: Tensor, offset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Two results, and a tensor that is not annotated."""
    scaled = x * 2 if offset is None else x * 2 + offset
    return scaled, x.sum(1).unsqueeze(1) * w


@register_op("m^ k, 1 -> ?", name="dtensortest::column_max", fake=lambda x, s: x[0] * s)
def column_max(x: Tensor, scale: Tensor) -> Tensor:
    """A result that the annotation leaves open."""
    return x.amax(0) * scale


def _part(site: SplitSite) -> dict[str, int]:
    return {"part": site.index, "parts": site.parts, "columns": site.size}


@register_op(
    lambda x, w, part, parts, columns: (
        "l h, g^ -> l h" if columns else ("l (g 3), g -> l (g 3)", "l h, g^ -> l h")
    ),
    name="dtensortest::scale_groups",
    rule=PartitionRule(told={"h": Told(_part)}),
)
def scale_groups(x: Tensor, w: Tensor, part: int = 0, parts: int = 1, columns: int = 0) -> Tensor:
    """Three columns of x to each entry of w; or any columns, if the op is told which."""
    columns = columns or x.shape[1]
    first = part * -(-columns // parts)
    return x * w.repeat_interleave(columns // len(w))[first : first + x.shape[1]]


def _no_cost(*_: Any) -> InnerCost:
    return InnerCost()


def _tokens_and_group(site: SplitSite) -> dict[str, Any]:
    return {"tokens": site.size, "group": site.group}


SHARES = PartitionRule({"l": Communicates(_tokens_and_group, _no_cost)})
WHOLES = PartitionRule({"l": Communicates(_tokens_and_group, _no_cost, whole_gradients=True)})


def _mean(x: Tensor, tokens: int, group: str) -> Tensor:
    total = x.sum(1)
    return (SumOverRanks.apply(total, group) if group else total) / (tokens or x.shape[1])


@register_op("b l c^ -> b c^", name="dtensortest::mean", rule=SHARES)
def mean(x: Tensor, tokens: int = 0, group: str = "") -> Tensor:
    """Over the tokens of all ranks, of which there are ``tokens``: whole on each."""
    return _mean(x, tokens, group)


def _centred(x: Tensor, gain: Tensor, tokens: int = 0, group: str = "") -> tuple[Tensor, Tensor]:
    """A result that is cut and one, the mean, that is whole on every rank."""
    m = _mean(x, tokens, group)
    return (x - m[:, None]) * gain, m * gain


def _centred_backward(wholes: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """The gradients by hand, from this rank's share of that of the mean or from the whole."""

    def backward(
        dy: Tensor | None,
        dmean: Tensor | None,
        x: Tensor,
        gain: Tensor,
        tokens: int,
        group: str,
        y: Tensor,
        mean: Tensor,
    ) -> tuple[Tensor, Tensor]:
        dy = torch.zeros_like(y) if dy is None else dy
        dmean = torch.zeros_like(mean) if dmean is None else dmean
        if wholes and group:
            dmean = dmean / dist.get_world_size(group_named(group))
        m = _mean(x, tokens, group)
        dm = _mean((dmean * gain - (dy * gain).sum(1))[:, None], tokens or x.shape[1], group)
        dgain = (dy * (x - m[:, None])).sum((0, 1)) + (dmean * m).sum(0)
        return dy * gain + dm[:, None], dgain

    return backward


def _declare_centred(name: str, rule: PartitionRule, **backward: Any) -> Callable[..., Any]:
    annotation = "b l c^, c^ -> b l c^, b c^"
    return register_op(annotation, name=f"dtensortest::{name}", rule=rule, **backward)(_centred)


OPS: dict[str, Callable[..., Any]] = {
    "mean": mean,
    "centred": _declare_centred("centred", SHARES),
    "centred by shares": _declare_centred(
        "centred_by_shares", SHARES, backward=_centred_backward(False)
    ),
    "centred by wholes": _declare_centred(
        "centred_by_wholes", WHOLES, backward=_centred_backward(True)
    ),
    "matmul": matmul,
    "two": two,
    "column_max": column_max,
    "scale_groups": scale_groups,
}

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """The one mesh of this shape: DTensor's caches take equal meshes for the same."""
    if shape not in _meshes:
        names = ("outer", "inner")[-len(shape) :]
        _meshes[shape] = init_device_mesh(device(), shape, mesh_dim_names=names)
    return _meshes[shape]


def placed(whole: Tensor, mesh: DeviceMesh, places: str) -> Tensor:
    """A whole tensor, the same on every rank, as a DTensor leaf on the mesh's devices."""
    whole = whole.to(mesh.device_type)
    if places == "-":
        return whole
    if "P" in places:
        assert mesh.ndim == 1
        part = whole * 0.25 if mesh.get_local_rank() else whole * (1 - 0.25 * (mesh.size() - 1))
        laid = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    else:
        where: list[Placement] = [Replicate() if p == "R" else Shard(int(p)) for p in places]
        laid = distribute_tensor(whole, mesh, where, src_data_rank=None)
    return laid.detach().requires_grad_(whole.is_floating_point())


def shown(tensor: Any) -> str:
    """Where a tensor lies, as letters."""
    if not isinstance(tensor, DTensor):
        return "-"
    letters = {Replicate: "R", Partial: "P"}
    return "".join(letters.get(type(p)) or str(p.dim) for p in tensor.placements)  # type: ignore


def run(
    function: Callable[..., Any], inputs: Sequence[Tensor], douts: Sequence[Tensor | None]
) -> Any:
    """Results and gradients, where each lies and what it is."""
    results = function(*inputs)
    results = [results] if isinstance(results, Tensor) else list(results)
    local = [tuple(r.to_local().shape) for r in results]
    loss = sum(
        (r.full_tensor() * dout.to(r.device)).sum()
        for r, dout in zip(results, douts, strict=False)
        if dout is not None
    )
    leaves = [t for t in inputs if isinstance(t, DTensor) and t.requires_grad]
    grads = torch.autograd.grad(loss, leaves)
    out = [*results, *grads]
    return [shown(t) for t in out], [whole(t) for t in out], local


def user_op(
    name: str, shapes: Any, places: Places, mesh: tuple[int, ...] = (2,), used: Any = None
) -> Any:
    """A user's op on inputs laid out so, and a loss of its results, or of those ``used``."""
    inputs, douts = user_inputs(name, shapes)
    douts = [dout if used is None or n in used else None for n, dout in enumerate(douts)]
    laid = [placed(t, mesh_of(mesh), p) for t, p in zip(inputs, places, strict=True)]
    return run(OPS[name], laid, douts)


def user_inputs(name: str, shapes: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Whole inputs, and gradients of the results."""
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    results = OPS[name](*inputs)
    results = [results] if isinstance(results, Tensor) else results
    return inputs, [torch.randn(r.shape, generator=g, dtype=r.dtype) for r in results]


def attention(
    case: Case, places: Places, mesh: tuple[int, ...] = (2,), where: dict[str, Any] | None = None
) -> Any:
    """An attention op on q, k, v laid out so; a packed case's cu_seqlens are replicated.

    Args:
        places: of q, k, v and, where the case has them, of the sink and the ALiBi slopes, which are
            replicated where left out.
        where: further arguments of the op.
    """
    laid_on = mesh_of(mesh)
    *inputs, dout = case.tensors()
    slopes, sink = case.per_head()
    inputs += [t for t in (sink, slopes) if t is not None]
    given = [*places, *["R" * laid_on.ndim] * (len(inputs) - len(places))]
    laid = [placed(t, laid_on, p) for t, p in zip(inputs, given, strict=True)]
    options = {**(where or {})}
    if slopes is not None:
        options["alibi_slopes"] = laid.pop().detach()
    if case.op != "varlen":
        return run(lambda *leaves: case.call(*leaves, **options), laid, douts(case, dout))
    cu = [
        placed(torch.tensor(cu, dtype=torch.int32), laid_on, "R" * laid_on.ndim)
        for cu in (case.cu_seqlens, case.cu_seqlens_k or case.cu_seqlens)
    ]
    options |= {"causal": case.causal, "window_size": case.window, "return_lse": True}

    def packed(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Any:
        return wrap_ring_attn_varlen_func(q, k, v, *cu, sink=sink, **options)

    return run(packed, laid, douts(case, dout))


def douts(case: Case, dout: Tensor) -> list[Tensor]:
    """Gradients of out and of lse, which must be finite."""
    lse = (*dout.shape[:-3], dout.shape[-2], dout.shape[-3])
    return [dout, torch.linspace(-1, 2, dout[..., 0].numel(), dtype=dout.dtype).view(lse)]


def alone(case: Case) -> list[Tensor]:
    """Results and gradients of an attention op on one device."""
    *inputs, dout = case.tensors()
    sink = case.per_head()[1]
    leaves = [t.requires_grad_() for t in (*inputs, *([] if sink is None else [sink]))]
    results = case.call(*leaves)
    grads = torch.autograd.grad(results, leaves, douts(case, dout))
    return [*(r.detach() for r in results), *grads]


def refused(job: str, *args: Any) -> str:
    """The error of another job."""
    return refusal({"user_op": user_op, "attention": attention}[job], *args)
