"""What a kernel is asked for, and what it can do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# What a request may need beyond a causal or full softmax, and a kernel may have.
FEATURES = (
    "softcap",
    "alibi",
    "dropout",
    "scale of 0 or less",  # of scores; libraries take a row's largest score before they scale it
    "window",  # a bound on how far back a row attends
    "lse gradient",
    "deterministic",  # gradients the same bit for bit from run to run
    "64-bit indices",  # tensors of LARGE elements or more
)
LARGE = 2**31
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Request:
    """What a kernel is asked for; the same for every rank of a call.

    Attributes:
        device: of q. dtype: of q, k and v.
        head_dim, v_dim: of q and k, of v. q_heads, kv_heads: of the rank's call.
        features: some of FEATURES, in that order.
        shape_class: one of "full", "causal", "packed", "window" and "sparse": what its speed
            depends on.
        tokens: keys of the whole mask; ops round this to a power of two (``speeds.bucket``).
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_dim: int
    q_heads: int
    kv_heads: int
    features: tuple[str, ...] = ()
    shape_class: str = "causal"
    tokens: int = 0


@dataclass(frozen=True)
class Capabilities:
    """What a kernel can do on one type of device. A request outside of it is refused, never
    approximated.

    Attributes:
        device: "cpu" or "cuda".
        features: some of FEATURES.
        widest: the greatest head dim, of q and of v; None: any.
        multiple: what both must be multiples of.
        lse_columns: by how much a gradient of lse widens v, see
            :func:`~..window.columns.widened`.
        arch: the lowest compute capability of the GPU, as (major, minor).
        majors: major compute capabilities that the library has kernels for; empty where it has
            them for all from ``arch`` on.
    """

    device: str
    dtypes: tuple[torch.dtype, ...]
    features: tuple[str, ...] = ()
    widest: int | None = None
    multiple: int = 1
    lse_columns: int = 0
    arch: tuple[int, int] = (0, 0)
    majors: tuple[int, ...] = ()

    def refuses(self, request: Request) -> str | None:
        """Why the kernel cannot take the request, or None if it can."""
        if request.dtype not in self.dtypes:
            return f"takes {', '.join(map(str, self.dtypes))}, not {request.dtype}"
        lacking = [feature for feature in request.features if feature not in self.features]
        if lacking:
            return f"has no {', '.join(lacking)}"
        d, e = request.head_dim, request.v_dim
        if d % self.multiple or e % self.multiple:
            return f"takes head dims that are multiples of {self.multiple}, not {d} and {e}"
        most = self.widest
        if most is not None and max(d, e) > most:
            return f"takes head dims of q and v up to {most} and {most}, not {d} and {e}"
        most_e = (e if most is None else most) - self.lse_columns
        if "lse gradient" in request.features and e > most_e:
            return f"takes a head dim of v up to {most_e} with lse gradient, not {e}"
        return self.other_arch(request.device)

    def other_arch(self, device: torch.device) -> str | None:
        """What a GPU lacks to run the kernel at all, or None."""
        if self.arch == (0, 0):
            return None
        found = torch.cuda.get_device_capability(device)
        needed, has = (".".join(map(str, version)) for version in (self.arch, found))
        if found >= self.arch and self.majors and found[0] not in self.majors:
            return f"runs on compute capability {' or '.join(map(str, self.majors))}, not {has}"
        return None if found >= self.arch else f"needs compute capability {needed}, not {has}"
