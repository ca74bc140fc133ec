"""One file for each kernel that :func:`~..choice.choose` picks from, and for what it needs."""
