"""First on Python's path, this folder lets programs for GPUs and nnscaler's own ops run on CPUs."""
