"""How many devices a plan spans, with nnscaler's names, so that one call serves both engines."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

# Fields that are nnscaler's and not yet the embedded engine's: only their defaults are accepted.
_LATER = (
    "use_zero",
    "zero_ngroups",
    "zero_use_reduce_scatter",
    "inference_only",
    "use_end2end",
    "use_async_reducer",
    "pas_config",
)


@dataclass(frozen=True)
class ComputeConfig:
    """Devices of a plan and of the whole run.

    Attributes:
        plan_ngpus: ranks that one copy of the model is cut over.
        runtime_ngpus: all ranks, a multiple of ``plan_ngpus``; None reads ``WORLD_SIZE``. The model
            is copied ``runtime_ngpus / plan_ngpus`` times, each copy with its own batch
            (data parallelism outside the plan).
        reducer_bucket_cap_mb: largest gradient bucket in MiB; None or 0 means 25.
        use_zero, zero_ngroups, zero_use_reduce_scatter, inference_only, use_end2end,
        use_async_reducer, pas_config: nnscaler's; only the defaults for now.

    Raises:
        ValueError: counts that are not positive or do not divide.
        NotImplementedError: a field that is not supported yet is set; names it.
    """

    plan_ngpus: int
    runtime_ngpus: int | None = None
    use_zero: int = 0
    zero_ngroups: int = 1
    zero_use_reduce_scatter: bool = False
    inference_only: bool = False
    use_end2end: bool = False
    use_async_reducer: bool = False
    reducer_bucket_cap_mb: float | None = None
    pas_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.runtime_ngpus is None:
            world = int(os.environ.get("WORLD_SIZE", self.plan_ngpus))
            object.__setattr__(self, "runtime_ngpus", world)
        if self.plan_ngpus < 1 or self.ranks < 1 or self.ranks % self.plan_ngpus:
            raise ValueError(
                "ComputeConfig: runtime_ngpus must be a multiple of plan_ngpus, both at least 1; "
                f"got plan_ngpus={self.plan_ngpus}, runtime_ngpus={self.runtime_ngpus}"
            )
        cap = self.reducer_bucket_cap_mb
        if cap is not None and cap < 0:
            raise ValueError(
                f"ComputeConfig: reducer_bucket_cap_mb must not be negative, got {cap}"
            )
        for item in fields(self):
            value = getattr(self, item.name)
            default = {} if item.name == "pas_config" else item.default
            if item.name in _LATER and value != default:
                raise NotImplementedError(
                    f"ComputeConfig: {item.name}={value!r} is not supported yet"
                )

    @property
    def ranks(self) -> int:
        """``runtime_ngpus``, known."""
        assert self.runtime_ngpus is not None
        return self.runtime_ngpus

    @property
    def num_scale_units(self) -> int:
        """Copies of the model, each over ``plan_ngpus`` ranks."""
        return self.ranks // self.plan_ngpus
