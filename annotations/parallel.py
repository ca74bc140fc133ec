"""``parallelize``: one call, whichever engine does it."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .engines.config import as_own

_logger = logging.getLogger(__name__)

ENGINES = ("auto", "nnscaler", "torch")


def parallelize(
    module_or_module_class: torch.nn.Module | type[torch.nn.Module],
    dummy_forward_args: Mapping[str, Any],
    pas_policy: str | Callable[..., Any],
    compute_config: Any,
    *,
    engine: str = "auto",
    **options: Any,
) -> Any:
    """Cut a single-device module over ranks. The same call as nnscaler's.

    Every rank calls this alike, after ``torch.distributed.init_process_group``. The model's
    attention calls ``wrap_*_attn_func`` without a group.

    Args:
        module_or_module_class: a module written for one device; nnscaler also takes a class.
        dummy_forward_args: example arguments of ``forward`` by name.
        pas_policy: ``"cp"`` cuts attention on its sequence, in both engines: the embedded one plans
            the rest to move the fewest bytes, nnscaler leaves it to autodist. ``"cp_follow"``, with
            nnscaler, has the other ops follow without a search. Else a policy of the engine's own:
            see :class:`~annotations.engines.torch.OpSite` and nnscaler's policies.
        compute_config: :class:`ComputeConfig`, this package's or nnscaler's; either serves either
            engine. Fields that an engine does not support are refused where they are set.
        engine: ``"torch"`` is the embedded one, ``"nnscaler"`` needs it installed. ``"auto"`` is
            nnscaler where the config is nnscaler's, or where nnscaler is installed, CUDA is there
            and the policy is a name; else the embedded one. Which it is, is logged.
        options: ``module_dtype``, and with nnscaler its other keyword arguments.
    Returns:
        A module to train as the original, with ``sync_grad()`` before each optimizer step, and with
        ``plan``, which prints what was decided. With nnscaler, its ParallelModule (or what
        ``load_module`` and a class ask for).

    Raises:
        ValueError: unknown engine, or what the engine raises.
        ModuleNotFoundError: nnscaler was asked for and is not installed; says how to install it.
    """
    if engine not in ENGINES:
        raise ValueError(f"parallelize: engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if engine == "auto":
        engine, why = _choose(pas_policy, compute_config)
        _logger.info("parallelize: engine %s, because %s", engine, why)
    if engine == "nnscaler":
        if not _installed():
            raise ModuleNotFoundError(
                "parallelize: engine='nnscaler' needs nnscaler 0.9, which is missing; install "
                "it from its repository, or use engine='torch'"
            )
        from .engines import nnscaler

        run, config = nnscaler.parallelize, nnscaler.as_config(compute_config)
    else:
        from .engines import torch as embedded

        run, config = embedded.parallelize, as_own(compute_config)
    return run(module_or_module_class, dummy_forward_args, pas_policy, config, **options)


def _choose(policy: Any, config: Any) -> tuple[str, str]:
    if type(config).__module__.partition(".")[0] == "nnscaler":
        return "nnscaler", "compute_config is nnscaler's"
    if not _installed():
        return "torch", "nnscaler is not installed"
    if not torch.cuda.is_available():
        return "torch", "nnscaler needs CUDA"
    if callable(policy):
        return "torch", "the policy is a function; name the engine if it is for nnscaler"
    return "nnscaler", "it is installed"


def _installed() -> bool:
    return importlib.util.find_spec("nnscaler") is not None
