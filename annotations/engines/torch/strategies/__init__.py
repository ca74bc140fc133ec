"""How each op may run on a mesh, and how tensors get from one placement to another."""
