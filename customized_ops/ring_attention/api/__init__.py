"""Thin faces of this package under the names that users of other packages import.

Each file starts with a table: a name or argument there, what it is here, what is refused and why.

| file | names of |
|---|---|
| `yunchang.py` | yunchang (long-context-attention, USP), with `sequence_*.py` |
| `ring_swa.py` | ring_swa (ring-sliding-window-attention) |
"""
