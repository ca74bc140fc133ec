"""Attention on several GPUs beside its peers and beside the ideal; see ``attention.py``.

.. include:: README.md
"""

__all__: list[str] = []  # import its modules by name
