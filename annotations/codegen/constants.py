"""Constants that graphs and generated code hold as text: masks, layouts, any picklable value."""

from __future__ import annotations

import base64
import pickle
import zlib
from functools import lru_cache
from typing import Any

_MARK = "seqshard constant: "


def to_text(value: Any) -> str:
    """``value`` as text, for :func:`from_text`."""
    return _MARK + base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def is_text(value: Any) -> bool:
    """Whether this is a result of :func:`to_text`."""
    return isinstance(value, str) and value.startswith(_MARK)


@lru_cache(maxsize=256)
def from_text(text: str) -> Any:
    """The value of a text; the same object for the same text."""
    return pickle.loads(zlib.decompress(base64.b64decode(text.removeprefix(_MARK))))
