"""Masks, layouts, plans and their executor: the one core under every op.

.. include:: ../docs/design.md
"""

__all__: list[str] = []  # its modules are imported by their names
