"""nnscaler itself, on gloo ranks: a harness, and its own tests.

The folder is not called nnscaler: ``tests`` is on the path, so a folder of that name would be found
as the package wherever the real one is missing.
"""
