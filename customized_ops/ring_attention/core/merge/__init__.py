"""Merging parts of attention by their log-sum-exp, and adding up rows.

``merge`` is the arithmetic: two results into one, and the running result or sum of several;
``rows`` copies and adds rows by index. On GPUs with Triton ``triton_kernels`` do both in one pass;
``launch`` starts them.
"""

from .merge import merge_

__all__ = ["merge_"]
