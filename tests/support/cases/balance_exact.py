"""The best assignment of few chunks to ranks, with a proven bound, by integer programming."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from customized_ops.ring_attention.core.arrays import Ints

# Up to this many variables (chunks * ranks) an assignment may be solved exactly, ...
EXACT_VARIABLES = 400
# ... in at most so many branch-and-bound nodes, times variables: some seconds at worst.
EXACT_EFFORT = 600_000
# What the solver's numbers may be off by, relatively.
PRECISION = 1e-6


def solve(work: Ints, group_size: int, least: float) -> tuple[Ints | None, float]:
    """The assignment with the least largest load, or the best found; and a proven bound of it.

    Args:
        work: int64[n], of each chunk, 0 or more and not all 0.
        least: a bound that is known already.
    Returns:
        int64[n] ranks, None if the effort allowed found no assignment; the bound, up to PRECISION.
    """
    return _solve(work.tobytes(), group_size, least)


@lru_cache(maxsize=64)
def _solve(content: bytes, group_size: int, least: float) -> tuple[Ints | None, float]:
    """A mixed-integer program: x[i, r] says that rank r holds the i-th largest chunk, and the
    largest load m is minimised. Ranks are alike, so the i-th largest goes to one of the first i.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, hstack, kron

    work = np.frombuffer(content, dtype=np.int64)
    n, most = len(work), int(work.max())
    order = np.argsort(-work, kind="stable")
    size = work[order] / most
    # Columns are x[0, 0], x[0, 1], ..., x[n - 1, P - 1], m.
    no_m = csr_array((n, 1)), csr_array((group_size, 1))
    per_chunk = hstack([kron(eye_array(n), np.ones((1, group_size))), no_m[0]])
    per_rank = hstack([kron(np.ones((1, n)), eye_array(group_size)), no_m[1]])
    over_m = hstack([kron(size[None], eye_array(group_size)), -np.ones((group_size, 1))])
    allowed = np.arange(group_size)[None, :] <= np.arange(n)[:, None]
    objective = np.append(np.zeros(n * group_size), 1)
    solved = milp(
        objective,
        integrality=1 - objective,
        bounds=Bounds(objective * least / most, np.append(allowed.reshape(-1), np.inf)),
        constraints=[
            LinearConstraint(per_chunk, 1, 1),
            LinearConstraint(per_rank, n // group_size, -(-n // group_size)),
            LinearConstraint(over_m, -np.inf, 0),
        ],
        options={"node_limit": EXACT_EFFORT // (n * group_size), "mip_rel_gap": 0},
    )
    bound = least
    if solved.mip_dual_bound is not None and np.isfinite(solved.mip_dual_bound):
        # Loads are whole numbers.
        bound = max(least, float(np.ceil(solved.mip_dual_bound * most * (1 - PRECISION))))
    if solved.x is None:
        return None, bound
    found = np.zeros(n, dtype=np.int64)
    found[order] = solved.x[:-1].reshape(n, group_size).argmax(axis=1)
    found.setflags(write=False)
    return found, bound
