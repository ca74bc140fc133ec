"""From a module to a graph of ops that can be cut exactly."""
