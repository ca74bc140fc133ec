"""Running a planned graph, on DTensors or lowered to plain tensors."""
