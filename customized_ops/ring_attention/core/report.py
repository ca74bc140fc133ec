"""A plan as a table."""

from __future__ import annotations

from .plan import Plan


def report(
    plan: Plan, q_heads: int, kv_heads: int, head_dim: int, v_dim: int | None, itemsize: int
) -> str:
    """The forward pass as a table: work, calls and bytes per rank.

    Bytes are what the rank sends and receives: keys, values, given rows and their output and
    lse. ``itemsize`` is bytes per element of q, k, v.
    """
    sent = plan.forward_bytes(q_heads, kv_heads, head_dim, v_dim, itemsize)
    area = plan.area
    mean = area.mean()
    lines = [
        f"{plan.mask.q_len} queries x {plan.mask.k_len} keys, {plan.mask.area} pairs, "
        f"{plan.group_size} ranks, q {plan.q_layout}, k {plan.k_layout}, "
        + ("gathered" if plan.gathered else f"{plan.n_stages} stages"),
        f"{'rank':>4} {'tokens':>8} {'pairs':>14} {'of mean':>8} {'calls':>6} "
        f"{'kv in':>8} {'rows in':>8} {'sends':>10} {'receives':>10}",
    ]
    for r in range(plan.group_size):
        share = area[r] / mean if mean else 1.0
        lines.append(
            f"{r:>4} {plan.q_layout.sizes[r]:>8} {area[r]:>14} {share:>8.3f} "
            f"{plan.rank(r).calls:>6} {plan.kv_tokens()[r, 1]:>8} {plan.q_tokens()[r, 1]:>8} "
            f"{format_bytes(sent[r, 0]):>10} {format_bytes(sent[r, 1]):>10}"
        )
    lines.append(f"imbalance (largest / mean): {area.max() / mean if mean else 1.0:.3f}")
    return "\n".join(lines)


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
