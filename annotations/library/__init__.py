"""The ``torch.library`` and DTensor sides of a declaration: schema, kernels, autograd, sharding."""
