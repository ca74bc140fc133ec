"""Other ways to cut attention over ranks, each as its users run it."""
