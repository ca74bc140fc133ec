"""``register_op``: the ``torch.library`` op of a declaration, its autograd, its DTensor rule."""
