"""Types of numpy arrays in annotations, and tables of columns."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.number]


def columns(*arrays: npt.NDArray[np.integer | np.bool_]) -> Ints:
    """Arrays [n] as one table [n, columns]. Three times as fast as ``np.stack``, which matters for
    tables of a few rows."""
    return np.array(arrays).T
