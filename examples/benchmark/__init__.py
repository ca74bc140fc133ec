"""Attention on several GPUs beside its peers and beside the ideal; see ``attention.py``."""
