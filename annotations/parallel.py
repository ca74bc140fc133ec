"""``parallelize``: one call for all engines."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

import torch

from .engines.config import EMBEDDED_PAS_CONFIG, NNSCALER_OPTIONS, only_nnscaler

_logger = logging.getLogger(__name__)

REPOSITORY = "https://github.com/msrasys/nnscaler"
# Modules with ``parallelize`` and ``as_config`` by the engine's name; imported on first use.
ENGINES = {"nnscaler": "annotations.engines.nnscaler", "torch": "annotations.engines.torch"}

# Policies that only nnscaler's engine has: with engine="auto" they choose it. Add a policy of
# nnscaler/sequence_policies.py here too, unless the torch engine has one of that name.
NNSCALER_POLICIES = ("cp_follow", "autodist", "pp", "data", "fsdp")
ALMOST = 0.85  # how similar two words must be, as difflib measures it


def parallelize(
    module_or_module_class: torch.nn.Module | type[torch.nn.Module],
    dummy_forward_args: Mapping[str, Any],
    pas_policy: Any,
    compute_config: Any,
    *,
    engine: str = "auto",
    **options: Any,
) -> Any:
    """Cut a single-device module over ranks. The same call as nnscaler's.

    Every rank makes the same call, after ``torch.distributed.init_process_group``. The model's
    attention calls ``wrap_*_attn_func`` without a group. What each engine does with the arguments
    is described in :func:`annotations.engines.torch.parallelize` and
    :mod:`annotations.engines.nnscaler`.

    Args:
        module_or_module_class: a module written for one device; nnscaler also takes a class.
        dummy_forward_args: example arguments of ``forward`` by name.
        pas_policy: a policy of the engine. Both have ``"cp"``, attention cut on its sequence: the
            embedded one plans the rest to move the fewest bytes, nnscaler leaves it to autodist.
        compute_config: :class:`ComputeConfig`, this package's or nnscaler's, for either engine.
        engine: ``"torch"`` is the embedded one, ``"nnscaler"`` needs it installed. ``"auto"`` is
            nnscaler if the call has something of nnscaler's: its ComputeConfig, a field that only
            nnscaler acts on, one of its keyword arguments or policies; else the embedded one. So
            what a call does never changes because a package was installed. The engine and the
            reason are logged.
        options: other keyword arguments of the engine.
    Returns:
        A module to train like the original, with ``sync_grad()`` before each optimizer step, and
        with ``plan``, which prints what was decided. With nnscaler, its ParallelModule (or what it
        returns for ``load_module`` and for a class).

    Raises:
        ValueError: unknown engine, or what the engine raises.
        TypeError: ``compute_config`` is not a ComputeConfig.
        ModuleNotFoundError: nnscaler is not installed; says how to install it.
    """
    if engine not in ("auto", *ENGINES):
        known = ", ".join(("auto", *ENGINES))
        raise ValueError(f"parallelize: engine must be one of {known}, got {engine!r}")
    fields = {"plan_ngpus", "runtime_ngpus"}
    if isinstance(compute_config, type) or not fields <= set(dir(compute_config)):
        raise TypeError(
            "parallelize: compute_config must be a ComputeConfig, this package's or nnscaler's, "
            f"got {compute_config!r}"
        )
    why = "engine='nnscaler' is asked for"
    if engine == "auto":
        engine, why = _choose(pas_policy, compute_config, options)
        _logger.info("parallelize: engine %s, because %s", engine, why)
    if engine == "nnscaler" and not _installed():
        raise ModuleNotFoundError(
            f"parallelize: {why}, and nnscaler 0.9 is not installed: install it from "
            f"{REPOSITORY}, or use engine='torch'"
        )
    made_by = importlib.import_module(ENGINES[engine])
    config = made_by.as_config(compute_config)
    return made_by.parallelize(
        module_or_module_class, dummy_forward_args, pas_policy, config, **options
    )


def _choose(policy: Any, config: Any, options: Mapping[str, Any]) -> tuple[str, str]:
    """The engine for a call, and the reason."""
    if type(config).__module__.partition(".")[0] == "nnscaler":
        return "nnscaler", "compute_config is nnscaler's"
    if isinstance(policy, str) and policy in NNSCALER_POLICIES:
        return "nnscaler", f"the policy {policy!r} is nnscaler's"
    for name in only_nnscaler(config):
        if name.startswith("pas_config["):
            _refuse_misspelt(config.pas_config)
            keys = ", ".join(EMBEDDED_PAS_CONFIG)
            return "nnscaler", f"{name} is not among the embedded engine's keys, {keys}"
        return "nnscaler", f"only nnscaler has {name} of ComputeConfig"
    for name, value in options.items():
        if name in NNSCALER_OPTIONS and value != NNSCALER_OPTIONS[name]:
            return "nnscaler", f"only nnscaler has the argument {name}"
    return "torch", "the call asks for nothing that only nnscaler has"


def _refuse_misspelt(pas_config: Mapping[Any, Any]) -> None:
    """Refuse a key that is almost one of the embedded engine's. It is no reason to take the other
    engine, whose policies read any keys."""
    for key in pas_config:
        near = difflib.get_close_matches(str(key), EMBEDDED_PAS_CONFIG, 1, ALMOST)
        if near and key != near[0]:
            raise ValueError(
                f"parallelize: pas_config has no key {key!r}; did you mean {near[0]!r}? For a key "
                "of nnscaler's policies say engine='nnscaler'"
            )


def _installed() -> bool:
    return importlib.util.find_spec("nnscaler") is not None
