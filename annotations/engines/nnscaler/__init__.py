"""The nnscaler engine. Importing it registers every declared function with nnscaler 0.9."""

from .engine import as_config, parallelize, register

__all__ = ["as_config", "parallelize", "register"]
