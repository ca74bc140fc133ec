"""Calls of linear attention over ranks, and the recurrence that they are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from customized_ops.linear_attention import wrap_gated_delta_rule_func, wrap_gated_linear_attn_func
from customized_ops.ring_attention import AttnMask, Layout, run_ranks
from customized_ops.ring_attention.core.merge.merge import accumulation_dtype


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    initial: Tensor,
    ends: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Token by token. ``initial``: [documents, b, hv, dk, dv], as the states returned."""
    each = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(each, 2) for x in (q, k))
    g = g if g.ndim == 4 else g.unsqueeze(-1)
    outs, finals = [torch.zeros_like(v[:, :0])], []
    for document, (start, stop) in enumerate(itertools.pairwise(ends)):
        state = initial[document]
        for t in range(start, stop):
            state = g[:, t].exp().unsqueeze(-1) * state
            u = v[:, t]
            if beta is not None:
                held = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
                u = beta[:, t].unsqueeze(-1) * (u - held)
            state = state + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
            outs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state).unsqueeze(1))
        finals.append(state)
    return torch.cat(outs, 1), torch.stack(finals) if finals else initial


@dataclass(frozen=True)
class LinearCase:
    """A call: shapes, documents and how its tokens lie; values follow from ``seed``.

    Attributes:
        delta: the delta rule, else gates alone. channels: a decay for each channel.
        heads: of q and k, and of v. dims: dk and dv.
        lengths: of documents; None for one sequence of ``tokens`` and a batch.
        layout: from the total and the number of ranks to one; None for the default.
        states: which there are: "", "initial", "final" or "both".
        dtype, device: what ops are given, and where; the values of :attr:`given` are those that
            ``dtype`` has, but for gates and states, which are in fp32 beside half precision.
    """

    tokens: int = 12
    delta: bool = True
    channels: bool = False
    batch: int = 2
    heads: tuple[int, int] = (1, 2)
    dims: tuple[int, int] = (3, 2)
    lengths: tuple[int, ...] | None = None
    layout: str = "contiguous"
    states: str = "both"
    decay: float = 1.0
    seed: int = 0
    kernel: str = "auto"
    dtype: torch.dtype = torch.float64
    device: str = "cpu"

    @property
    def total(self) -> int:
        return self.tokens if self.lengths is None else sum(self.lengths)

    @property
    def ends(self) -> list[int]:
        lengths = [self.total] if self.lengths is None else self.lengths
        return [0, *np.cumsum(lengths).tolist()]

    @property
    def cu_seqlens(self) -> list[int] | None:
        return None if self.lengths is None else self.ends

    @cached_property
    def given(self) -> dict[str, Tensor]:
        """The whole tensors, leaves."""
        draw = torch.Generator().manual_seed(self.seed)
        b, (h, hv), (dk, dv) = self.batch, self.heads, self.dims

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64)

        t, documents = self.total, len(self.ends) - 1 if self.lengths is not None else b
        k = torch.nn.functional.normalize(normal(b, t, h, dk), dim=-1)
        gates = (b, t, hv, dk) if self.channels else (b, t, hv)
        tensors = {"q": normal(b, t, h, dk), "k": k, "v": normal(b, t, hv, dv)}
        tensors["g"] = -normal(*gates).abs() * self.decay
        if self.delta:
            tensors["beta"] = normal(b, t, hv).sigmoid()
        if self.states in ("initial", "both"):
            tensors["initial_state"] = normal(documents, hv, dk, dv)
        rounded = {name: x.to(self.dtype_of(name)).double() for name, x in tensors.items()}
        return {name: x.requires_grad_() for name, x in rounded.items()}

    def dtype_of(self, name: str) -> torch.dtype:
        """What the op is given of a tensor."""
        return self.dtype if name in "qkv" else accumulation_dtype(self.dtype)

    @property
    def final(self) -> bool:
        return self.states in ("final", "both")

    def layout_over(self, ranks: int) -> Layout | None:
        """The layout of a name over ranks."""
        if self.layout == "default":
            return None
        if self.layout == "contiguous":
            return Layout.contiguous(self.total, ranks)
        if self.layout == "zigzag":
            return Layout.zigzag(self.total, ranks)
        if self.layout == "by document":
            return Layout.zigzag(self.total, ranks, self.ends)
        if self.layout == "striped":
            return Layout.striped(self.total, ranks, 2)
        if self.layout == "balanced":
            return Layout.balanced(AttnMask.varlen(self.ends, causal=True), ranks)
        draw = np.random.default_rng(self.seed)
        cuts = np.sort(draw.integers(0, self.total + 1, ranks - 1)).tolist()
        if self.layout == "uneven":
            return Layout.from_sizes(np.diff([0, *cuts, self.total]).tolist())
        assert self.layout == "scattered", self.layout
        pieces = int(draw.integers(1, 9))
        bounds = np.sort(draw.integers(0, self.total + 1, pieces - 1)).tolist()
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        for n in draw.permutation(pieces).tolist():
            start, stop = ([0, *bounds, self.total])[n : n + 2]
            ranges[int(draw.integers(ranks))].append((start, stop))
        return Layout.from_ranges(ranges)

    def weights(self, results: Sequence[Tensor]) -> list[Tensor]:
        """What results are multiplied by in the loss."""
        draw = torch.Generator().manual_seed(self.seed + 1)
        return [torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in results]

    def results(self, call: Callable[..., Any]) -> list[Tensor]:
        """out, the final state if asked for, and all gradients."""
        found = call(**self.given)
        found = list(found) if isinstance(found, tuple) else [found]
        loss = sum((x * w).sum() for x, w in zip(found, self.weights(found), strict=True))
        if not loss.requires_grad:  # no token, no state
            return [*found, *map(torch.zeros_like, self.given.values())]
        grads = torch.autograd.grad(loss, list(self.given.values()), materialize_grads=True)
        return [x.detach() for x in (*found, *grads)]

    def expected(self) -> list[Tensor]:
        """By the recurrence."""

        def call(initial_state: Tensor | None = None, **given: Tensor) -> Any:
            b, (_, hv), (dk, dv) = self.batch, self.heads, self.dims
            shape = (len(self.ends) - 1, b, hv, dk, dv)
            initial = torch.zeros(shape, dtype=torch.float64)
            if initial_state is not None:
                initial = initial + initial_state.reshape(shape)
            given.setdefault("beta", None)  # type: ignore[arg-type]
            out, final = recurrence(**given, initial=initial, ends=self.ends, scale=dk**-0.5)
            return (out, final.reshape(-1, hv, dk, dv)) if self.final else out

        return self.results(call)

    def on_rank(self, group: Any, rank: int, ranks: int) -> list[Tensor]:
        """One rank's out, final state, and gradients, in fp64."""
        layout = self.layout_over(ranks)
        where = layout or Layout.contiguous(self.total, ranks)
        parts = {
            name: (x.detach() if name == "initial_state" else where.shard(x.detach(), rank))
            .to(self.device, self.dtype_of(name), copy=True)
            .requires_grad_()
            for name, x in self.given.items()
        }
        function = wrap_gated_delta_rule_func if self.delta else wrap_gated_linear_attn_func
        found = function(
            **parts,
            output_final_state=self.final,
            cu_seqlens=self.cu_seqlens,
            process_group=group,
            layout=layout,
            kernel=self.kernel,
        )
        found = list(found) if isinstance(found, tuple) else [found]
        whole = [torch.empty(self.given["v"].shape), *found[1:]]
        weights = [x.to(self.device) for x in self.weights(whole)]
        loss = (found[0] * where.shard(weights[0], rank)).sum()
        if self.final:  # ranks use their copies unlike: shares that add up to the weights
            share = (rank + 1) / (ranks * (ranks + 1) / 2)
            loss = loss + (found[1] * weights[1] * share).sum()
        grads = torch.autograd.grad(loss, list(parts.values()))
        return [x.detach().double().cpu() for x in (*found, *grads)]

    def assembled(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Of what all ranks returned, the same as :meth:`expected`."""
        layout = self.layout_over(len(parts)) or Layout.contiguous(self.total, len(parts))
        names = ["out", *["final"] * self.final, *self.given]
        results = []
        for name, each in zip(names, zip(*parts, strict=True), strict=True):
            if name == "final":
                assert all(torch.equal(x, each[0]) for x in each)
                results.append(each[0])
            elif name == "initial_state":
                results.append(sum(each))
            else:
                results.append(layout.unshard(list(each)))
        return results

    def in_process(self, ranks: int) -> list[Tensor]:
        """Over ranks that are threads."""
        return self.assembled(
            run_ranks(ranks, lambda group: self.on_rank(group, group.rank, ranks))
        )


def check(case: LinearCase, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal to 1e-10 of the largest value."""
    names = ["out", *["final"] * case.final, *case.given]
    for name, x, y in zip(names, found, expected, strict=True):
        assert x.shape == y.shape, f"{case}: {name} is {tuple(x.shape)}, not {tuple(y.shape)}"
        error = (x - y).abs().max().item() if x.numel() else 0.0
        scale = max(1.0, y.abs().max().item()) if y.numel() else 1.0
        assert error <= 1e-10 * scale, f"{case}: {name} is off by {error:.1e}"


def random_case(seed: int) -> tuple[LinearCase, int]:
    """A case, and a number of ranks."""
    draw = np.random.default_rng(seed)

    def one_of(*choices: Any) -> Any:
        return choices[int(draw.integers(len(choices)))]

    packed, h = bool(draw.integers(2)), int(draw.integers(1, 3))
    count = int(draw.integers(1, 7))
    lengths = tuple(one_of(0, 1, 2, 3, 5, 17, 40) for _ in range(count)) if packed else None
    layouts = ["contiguous", "uneven", "zigzag", "striped", "balanced", "scattered"]
    case = LinearCase(
        tokens=int(draw.integers(0, 50)),
        delta=bool(draw.integers(2)),
        channels=bool(draw.integers(2)),
        batch=1 if packed else int(draw.integers(1, 3)),
        heads=(h, h * int(draw.integers(1, 3))),
        dims=(int(draw.integers(1, 5)), int(draw.integers(1, 5))),
        lengths=lengths,
        layout=one_of(*layouts, "by document") if packed else one_of(*layouts),
        states=one_of("", "initial", "final", "both"),
        decay=one_of(0.0, 0.1, 1.0, 30.0),
        seed=seed,
    )
    return case, int(draw.integers(1, 9))
