"""Masks, layouts, plans and their executor: the one core under every op."""
