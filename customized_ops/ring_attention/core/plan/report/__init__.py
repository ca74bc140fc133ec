"""A plan in figures, as a text and as a picture.

It is inside :mod:`.plan`, not beside it, because the two need one another: what is shown is a
:class:`.PlanValue` with its cost and bounds, and :class:`.Plan`, which users have, shows itself.
Users import it as :mod:`.core.report`.
"""

from .figures import Measures, measures
from .text import report

__all__ = ["Measures", "measures", "report"]
