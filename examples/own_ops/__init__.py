"""Custom ops: one that is declared and split, and one along the sequence."""
