"""One file for each library of kernels. What :func:`~..choice.choose` picks from is listed
there."""
