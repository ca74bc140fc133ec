"""What ranks of tests have imported when they are forked; see ``ranks.Pool``. The process that
forks them begins with the root of the repository as its path, and no other folder."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

sys.path += [str(path) for path in Path(__file__).parent.iterdir() if path.is_dir()]
with contextlib.suppress(ImportError):  # transformers is optional
    import hf_models  # noqa: F401
