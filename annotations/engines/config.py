"""How many devices a plan spans, with nnscaler's names, so that one call serves both engines."""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

# Fields that the embedded engine acts on; of nnscaler's others only the defaults are accepted.
_SUPPORTED = ("plan_ngpus", "runtime_ngpus", "reducer_bucket_cap_mb")


@dataclass(frozen=True)
class ComputeConfig:
    """Devices of a plan and of the whole run. nnscaler's fields, in its order.

    Attributes:
        plan_ngpus: ranks that one copy of the model is cut over.
        runtime_ngpus: all ranks, a multiple of ``plan_ngpus``; None reads ``WORLD_SIZE``. The model
            is copied ``runtime_ngpus / plan_ngpus`` times, each copy with its own batch
            (data parallelism outside the plan).
        reducer_bucket_cap_mb: largest gradient bucket in MiB; None or 0 means 25.

    Raises:
        ValueError: counts that are not positive or do not divide.
        NotImplementedError: another field is not at its default; names it.
    """

    plan_ngpus: int
    runtime_ngpus: int | None = None
    constant_folding: bool = False
    trace_strategy: str = "cuda_run_cpu_offload"
    use_zero: int = 0
    zero_ngroups: int = 1
    zero_use_reduce_scatter: bool = False
    zero_param_level_sharding: bool = False
    inference_only: bool = False
    use_end2end: bool = False
    use_fbw: bool = False
    use_async_comm: bool = False
    use_async_reducer: bool = False
    reducer_bucket_cap_mb: float | None = None
    reducer_replicated_params: bool = False
    reducer_none_grad: bool = False
    pas_config: dict[str, Any] = field(default_factory=dict)
    user_config: dict[str, Any] = field(default_factory=dict)

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
            default = {} if item.default is MISSING else item.default
            if item.name not in _SUPPORTED and value != default:
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
