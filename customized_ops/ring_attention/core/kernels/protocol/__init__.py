"""What a kernel is and is given (``kernel``), is asked for (``request``), and does to scores."""
