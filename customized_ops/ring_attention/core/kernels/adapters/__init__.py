"""One file for each kernel library. The kernels that :func:`~..choice.choose` picks from are
listed in its module."""
