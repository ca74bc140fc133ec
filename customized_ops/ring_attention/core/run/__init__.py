"""Running one rank's plan: the executor, its streams and its share of the heads."""
