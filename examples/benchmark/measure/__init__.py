"""Time, cycles, bytes and memory of a run."""
