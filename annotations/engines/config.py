"""``ComputeConfig``, with nnscaler's names, so that one call serves both engines."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

# Fields that the embedded engine acts on, and one about how nnscaler runs functions while tracing,
# when the embedded engine runs none. Other fields must have their defaults.
EMBEDDED_FIELDS = (
    "plan_ngpus",
    "runtime_ngpus",
    "reducer_bucket_cap_mb",
    "use_async_reducer",
    "use_end2end",
    "trace_strategy",
)

# Keys of pas_config that the embedded engine acts on: see ComputeConfig.
EMBEDDED_PAS_CONFIG = (
    "mesh_shape",
    "memory_bytes",
    "optimizer_bytes_per_parameter",
    "rates",
    "hoist",
)

# Keyword arguments of parallelize that only nnscaler has, with their defaults.
NNSCALER_OPTIONS: dict[str, Any] = {
    "gen_savedir": "./.nnscaler",
    "reuse": "match",
    "instance_name": None,
    "load_module": True,
    "module_fn": None,
    "init_module_params": True,
    "build_module_buckets": True,
    "broadcast_strategy": "none",
    "autoset_requires_grad": True,
}


@dataclass(frozen=True)
class ComputeConfig:
    """Devices of a plan and of the whole run. nnscaler's fields, in its order.

    Attributes:
        plan_ngpus: ranks that one copy of the model is cut over.
        runtime_ngpus: all ranks, a multiple of ``plan_ngpus``; None reads ``WORLD_SIZE``. The model
            is copied ``runtime_ngpus / plan_ngpus`` times, each copy with its own batch
            (data parallelism outside the plan).
        use_async_reducer: add up gradients while the backward runs, bucket by bucket. Then run all
            backwards of a step but the last within ``no_sync()`` (with nnscaler: in its
            ``accum_mode``).
        use_end2end: whether the module has ``train_step`` and ``infer_step``.
        reducer_bucket_cap_mb: largest gradient bucket in MiB; None or 0 means 25 (with nnscaler:
            25 for its asynchronous reducer, else no limit).
        pas_config: the planner's settings. The embedded engine has ``"mesh_shape"``, the ranks of a
            copy as a mesh of several axes (their product is ``plan_ngpus``; by default one axis;
            adjacent ranks are along the last); ``"memory_bytes"``, what a rank may hold (by
            default, with ``"auto"`` on CUDA, all of its device, else no limit);
            ``"optimizer_bytes_per_parameter"``, the optimizer's state for each element (by default
            8, two fp32 copies, as Adam has); ``"rates"``, speeds to plan with (an
            ``annotations.engines.torch.Rates``; by default those measured on this machine, if any);
            and ``"hoist"``, whether to permute a sequence once, before the first layer, into an
            order whose parts are even work: always (True) or never (False), by default if that is
            predicted to be faster.

    Only nnscaler acts on the other fields: the embedded engine refuses a value that is not the
    default, except for ``trace_strategy``, which is about tracing with nnscaler.

    Raises:
        ValueError: counts that are not positive or do not divide.
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

    @property
    def ranks(self) -> int:
        """``runtime_ngpus``, which is not None after initialisation."""
        assert self.runtime_ngpus is not None
        return self.runtime_ngpus

    @property
    def num_scale_units(self) -> int:
        """Copies of the model, each over ``plan_ngpus`` ranks."""
        return self.ranks // self.plan_ngpus

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The ranks of one copy as a mesh.

        Raises:
            ValueError: ``pas_config["mesh_shape"]`` is not ``plan_ngpus`` ranks.
        """
        given = self.pas_config.get("mesh_shape") if isinstance(self.pas_config, dict) else None
        if given is None:
            return (self.plan_ngpus,)
        sizes = tuple(given) if isinstance(given, list | tuple) else (given,)
        whole = all(isinstance(n, int) and n > 0 for n in sizes)
        if not whole or math.prod(sizes) != self.plan_ngpus:
            raise ValueError(
                f"ComputeConfig: pas_config['mesh_shape']={given!r} must be counts of ranks whose "
                f"product is plan_ngpus={self.plan_ngpus}"
            )
        return sizes


def changed(config: Any) -> dict[str, Any]:
    """The fields of a config, this package's or nnscaler's, that are not at their defaults."""
    found = {}
    for item in fields(config):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        value = getattr(config, item.name)
        if value != default and not (value is None and default == {}):
            found[item.name] = value
    return found


def as_own(config: Any) -> ComputeConfig:
    """A config of this package or of nnscaler as this package's.

    Raises:
        NotImplementedError: nnscaler's has a field that this package does not know, and it is set.
    """
    if isinstance(config, ComputeConfig):
        return config
    known = {item.name for item in fields(ComputeConfig)}
    for name, value in changed(config).items():
        if name not in known:
            raise NotImplementedError(f"ComputeConfig: {name}={value!r} is not known here")
    return ComputeConfig(**{name: getattr(config, name) for name in known})


def check_embedded(config: ComputeConfig) -> None:
    """Refuse settings that the embedded engine would ignore.

    Raises:
        NotImplementedError: a field that only nnscaler acts on is set; names it.
        ValueError: a setting has an invalid value.
    """
    for name, value in only_nnscaler(config).items():
        known = f"; its keys are {', '.join(EMBEDDED_PAS_CONFIG)}" if "[" in name else ""
        raise NotImplementedError(
            f"ComputeConfig: {name}={value!r} is not supported by the embedded engine yet{known}"
        )
    _ = config.mesh_shape  # which raises
    hoist = config.pas_config.get("hoist", False) if config.pas_config else False
    if not isinstance(hoist, bool):
        raise ValueError(f"ComputeConfig: pas_config['hoist'] must be True or False, got {hoist!r}")


def only_nnscaler(config: Any) -> dict[str, Any]:
    """The settings, of a config of this package or nnscaler, that the embedded engine ignores."""
    found = {n: value for n, value in changed(config).items() if n not in EMBEDDED_FIELDS}
    given = found.pop("pas_config", {})
    if not isinstance(given, Mapping):
        return {**found, "pas_config": given}
    keys = {f"pas_config[{key!r}]": x for key, x in given.items() if key not in EMBEDDED_PAS_CONFIG}
    return {**found, **keys}
