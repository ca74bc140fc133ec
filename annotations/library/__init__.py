"""The ``torch.library`` side of a declaration: schema, kernels, autograd, DTensor's rule."""
