"""Rows, tables and pictures of what was measured."""
