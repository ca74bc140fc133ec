"""Planning: remembered, quick, without torch, and anew where a call is another."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from customized_ops.ring_attention.core.cost import H200, CostModel
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import Plan, make_plan
from customized_ops.ring_attention.core.plan import plan as plan_module


def test_plans_are_cached_by_value():
    def build(**options):
        mask = AttnMask.varlen([0, 20, 50], causal=True)
        return make_plan(mask, Layout.contiguous(50, 4), Layout.zigzag(50, 4), **options)

    assert build() is build()
    assert build() is build(assignment="auto", stages=None, heads=(32, 8), team_size=1)
    assert build() is build(costs=CostModel())
    assert build() is not build(team_size=2) and build() is not build(heads=(8, 8))
    assert build() is not build(assignment="owner")
    assert build() is not build(stages=2)
    assert build().rank(2) is build().rank(2)


def test_plans_are_deterministic():
    def tables():
        plan_module._PLANS.clear()
        mask = AttnMask.dense(1000, causal=True, window=(300, 0))
        plan = make_plan(mask, Layout.contiguous(1000, 7), stages=2)
        ranks = [plan.rank(r) for r in range(7)]
        parts = [plan.work, plan.q_needed, plan.kv_needed]
        for mine in ranks:
            parts += [mine.q.send, mine.q.recv]
            for stage in mine.stages:
                parts += [stage.own, stage.remote]
                parts += [] if stage.kv is None else [stage.kv.send, stage.kv.recv]
        return plan, [part.tolist() for part in parts]

    (first, first_tables), (second, second_tables) = tables(), tables()
    assert first is not second
    assert first_tables == second_tables


def test_a_plan_prints_as_its_report():
    layout = Layout.contiguous(24, 3)
    plan = make_plan(AttnMask.causal(24), layout, team_size=3, heads=(6, 3))
    assert str(plan) == plan.report() == plan.report(6, 3)
    made_otherwise = Plan(plan.mask, layout, layout, plan.work, 3, plan.steps)
    assert str(made_otherwise) == made_otherwise.report(96, 24)
    assert str(plan).splitlines()[-1].startswith("imbalance (largest / mean): ")
    alone = make_plan(AttnMask.causal(24), layout)
    assert str(alone) == alone.report() == alone.report(32, 8, 128)
    work = [alone.simulate(*heads).rank_flops for heads in ((), (32, 8), (64,))]
    assert work[0] == work[1] == work[2] / 2
    for heads in ((30, None), (64, 0), (None, 5)):
        for function in (alone.report, alone.simulate):
            with pytest.raises(ValueError, match="query heads must be a multiple of key heads"):
                function(*heads)


def test_hosts_that_are_neither_text_nor_a_topology():
    with pytest.raises(TypeError, match="hosts are a Topology, or a text such as 8x4, got 8"):
        CostModel.over(8)


# ------------------------------------------------------------------------ speed

SPEED = runpy.run_path(
    str(Path(__file__).parents[3] / "examples/benchmark/parts/planning/plan_speed.py")
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "documents", "limit_seconds"), [(64, 256, 0.025), (256, 4096, 0.150)]
)
def test_planning_is_fast(ranks, documents, limit_seconds):
    """Limits far above what `plan_speed.py` measures, for slow and busy machines."""
    made, part, hit = map(min, SPEED["measure"](ranks, documents))
    assert made <= limit_seconds and part <= limit_seconds and hit <= 0.001


def test_documents_of_the_speed_table_fill_the_sequence():
    mask = SPEED["packed_documents"](256)
    assert mask.q_len == SPEED["TOKENS"] and 200 < len(mask.slices) <= 256


# ------------------------------------------------------------------ no torch here

WITHOUT_TORCH = """
import sys, types
sys.modules["torch"] = None  # importing it is an error from here on
for name, path in {packages!r}:
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [path]
from customized_ops.ring_attention.core.cost import H200, CostModel
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
plan = make_plan(AttnMask.dense(64, causal=True), Layout.contiguous(64, 4))
print(sum(plan.rank(r).area for r in range(4)))
import customized_ops.ring_attention.core.plan.report.picture
assert "matplotlib" not in sys.modules  # before a picture is asked for
"""


def test_planning_needs_neither_torch_nor_matplotlib():
    """The packages' own __init__ files import the ops, hence torch, so empty ones stand in."""
    core = Path(plan_module.__file__).parent.parent
    packages = [
        ("customized_ops", str(core.parent.parent)),
        ("customized_ops.ring_attention", str(core.parent)),
    ]
    program = WITHOUT_TORCH.format(packages=packages)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{64 * 65 // 2}\n"


@pytest.mark.parametrize("heads", [(4, 8), (6, 4)])
def test_heads_that_make_no_groups_are_not_split_among_teams(heads: tuple[int, int]) -> None:
    layout = Layout.contiguous(4096, 8)
    plan = make_plan(AttnMask.causal(4096), layout, heads=heads, team_size=None)
    assert plan.team_size == 1 and plan.area.sum() == 4096 * 4097 // 2


@pytest.mark.parametrize(
    "ranks, tokens, heads, batch, times",
    [(8, 1024, (16, 16), 16, 2.1), (2, 1024, (32, 8), 16, 1.7)],
)
def test_other_plans_for_larger_batches(
    ranks: int, tokens: int, heads: tuple[int, int], batch: int, times: float
) -> None:
    """With as much to compute, starting calls is no longer what takes time."""
    mask, layout = (
        AttnMask.dense(ranks * tokens, causal=True),
        Layout.contiguous(ranks * tokens, ranks),
    )
    one, many = (make_plan(mask, layout, heads=heads, team_size=None, batch=n) for n in (1, batch))
    seconds = [
        sum(each.seconds for each in H200.passes(plan, *heads, 128 * batch, 128 * batch, 2))
        for plan in (one, many)
    ]
    assert seconds[0] / seconds[1] == pytest.approx(times, abs=0.05)
    dims = {"head_dim": 64, "v_dim": 32, "batch": 2 * batch}
    request = make_plan(mask, layout, heads=heads, team_size=None, **dims).request
    assert request is not None
    assert request.head_dims == (128 * batch, 64 * batch)


def test_other_plans_for_wider_elements() -> None:
    """Links take longer and kernels do not, so for elements of 32 bits another plan is fastest."""
    mask, layout, heads = AttnMask.dense(16_384, causal=True), Layout.contiguous(16_384, 4), (32, 8)
    costs = CostModel(link_bytes=50e9)
    usual, narrow, wide = (
        make_plan(mask, layout, heads=heads, costs=costs, **given)
        for given in ({}, {"itemsize": 2}, {"itemsize": 4})
    )
    assert usual is narrow
    seconds = [
        sum(each.seconds for each in costs.passes(plan, *heads, 128, 128, 4))
        for plan in (narrow, wide)
    ]
    assert seconds[1] < 0.8 * seconds[0]
    with pytest.raises(ValueError, match="itemsize must be 1 byte or more, got 0"):
        make_plan(mask, layout, itemsize=0)


def test_only_few_ranks_are_made_together() -> None:
    """A table of the moves of all ranks would be too large where these are many."""
    for ranks in (8, 9):
        plan = make_plan(AttnMask.causal(144), Layout.zigzag(144, ranks))
        for rank in (3, 1):
            plan.exchanges(rank)
        assert len(plan._exchanges) == (8 if ranks == 8 else 2)
