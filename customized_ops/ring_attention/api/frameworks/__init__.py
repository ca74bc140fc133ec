"""Adapters for training frameworks, at the places where a framework accepts a parallel attention.

.. include:: ../../docs/frameworks.md
"""
