"""Probes of a parallel model: what it drops silently, whichever package shards it.

    report = check_parallel_model(alone, parallel, batch, group)     on every rank
    print(report)
    report.raise_if_failed()

.. include:: ../docs/probes.md
"""

from .check import check_parallel_model
from .model_run import ModelRun
from .probe_report import Check, ProbeError, ProbeReport

__all__ = ["Check", "ModelRun", "ProbeError", "ProbeReport", "check_parallel_model"]
