"""Other packages' names for this package's functions; nothing is computed here.

.. include:: ../docs/other_packages.md
"""

__all__: list[str] = []  # its modules are imported by their names
