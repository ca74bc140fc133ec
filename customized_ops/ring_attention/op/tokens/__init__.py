"""The tokens of a call: where documents end, which rank holds what, and in which order."""
