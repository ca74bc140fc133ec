"""Slots of training frameworks: the places where a framework takes an attention over ranks.

.. include:: ../../docs/frameworks.md
"""
