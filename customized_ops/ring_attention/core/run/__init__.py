"""Runs a rank's part of a plan: the executor, what its passes share, streams, a rank's heads."""
