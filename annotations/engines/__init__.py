"""Engines: what turns a single-device model into a parallel one.

``annotations.engines.torch`` is the embedded engine. The other one is nnscaler:

.. include:: ../docs/nnscaler.md
"""

__all__: list[str] = []  # its modules are imported by their names
