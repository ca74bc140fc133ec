"""Ops of one's own: one that is declared and split, and one along the sequence."""
