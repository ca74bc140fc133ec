"""Parts of the kernel benchmark: its arguments, the masks it measures, its clock and its table."""
