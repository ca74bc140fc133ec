"""What a kernel is and is given (``kernel``), what it is asked for (``request``), and what it does
to scores (``scoring``)."""
