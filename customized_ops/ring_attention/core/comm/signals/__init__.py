"""Signals between ranks that write to one another's memory, each with the fingerprint of a pass."""

from .fingerprint import NO_CALL, PARTS, differing, fingerprint, of_call, of_tables

__all__ = ["NO_CALL", "PARTS", "differing", "fingerprint", "of_call", "of_tables"]
