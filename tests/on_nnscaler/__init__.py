"""The nnscaler engine, real, on gloo ranks. All of it is skipped where nnscaler is not installed.

The folder is not called nnscaler: ``tests`` is on the path, so a folder of that name would be found
as the package wherever the real one is missing.
"""

import importlib.util

if importlib.util.find_spec("nnscaler") is None:
    import pytest

    pytest.skip("nnscaler is not installed: see CONTRIBUTING.md", allow_module_level=True)
