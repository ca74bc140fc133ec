"""This package's functions under the names of other packages; nothing is computed here.

.. include:: ../docs/other_packages.md
"""

__all__: list[str] = []  # import its modules by name
