"""Merging parts of attention by their log-sum-exp, and adding up rows."""

from .merge import merge_

__all__ = ["merge_"]
