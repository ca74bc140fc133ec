"""Of the benchmark of kernels: its arguments, the masks that it measures, its clock, its table."""
