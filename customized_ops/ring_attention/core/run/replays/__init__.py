"""Which passes and kernel calls are replayed, and how."""
