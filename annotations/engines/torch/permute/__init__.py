"""Sequences in another order, permuted once at the inputs of a graph."""
