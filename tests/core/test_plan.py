import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from customized_ops.ring_attention.core import plan as plan_module
from customized_ops.ring_attention.core.assign import COMPUTE, OWNER, ROW0, ROW1
from customized_ops.ring_attention.core.layout import Layout, LayoutError
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import GATHER_TOKENS, format_bytes, make_plan
from customized_ops.ring_attention.core.rank_plan import KEY0, KEY1, RECV, SEND, SEND_OFFSET, STAGE
from customized_ops.ring_attention.core.slices import to_dense

MASKS = {
    "full": AttnMask.dense(41),
    "causal": AttnMask.dense(41, causal=True),
    "window": AttnMask.dense(41, window=(5, 2)),
    "packed": AttnMask.varlen([0, 11, 11, 12, 30, 41, 41], causal=True),
    "sink": AttnMask.from_slices([(0, 41, 0, 3, -99, 0), (0, 41, 3, 41, -6, 0)], 41, 41),
    "sparse": AttnMask.from_slices(
        [(0, 9, 30, 37, -99, 99), (5, 20, 0, 8, -99, -7), (35, 41, 36, 41, 0, 9)], 41, 41
    ),
    "nothing": AttnMask.from_slices([], 41, 41),
    "no tokens": AttnMask.dense(0),
    "cross": AttnMask.dense(23, 41, causal=True),
    "more queries": AttnMask.dense(41, 23, causal=True),
}


def layouts_of(total: int) -> list[Layout]:
    third = total // 3
    return [
        Layout.contiguous(total, 1),
        Layout.contiguous(total, 4),
        Layout.zigzag(total, 4),
        Layout.from_sizes([third, 0, total - third, 0]),
        Layout.zigzag(total, 7),
        Layout.contiguous(total, 7),
    ]


def plans(mask, assignment, stages):
    """A plan for each pair of layouts that have as many ranks."""
    for q_layout, k_layout in itertools.product(layouts_of(mask.q_len), layouts_of(mask.k_len)):
        if q_layout.group_size == k_layout.group_size:
            yield make_plan(mask, q_layout, k_layout, assignment=assignment, stages=stages)


def over_plans(test):
    """Parametrise over what :func:`plans` takes."""
    test = pytest.mark.parametrize("assignment", ["owner", "balanced", "zigzag"])(test)
    test = pytest.mark.parametrize("stages", [0, 1, 3])(test)
    return pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)(test)


def fetched(exchanges, held):
    """What each rank's receive buffer holds once all ranks have exchanged parts of ``held``."""
    mail = {}
    for sender, exchange in enumerate(exchanges):
        for peer, start, count in exchange.send.tolist():
            part = held[sender][start : start + count]
            assert len(part) == count > 0, "what is sent exists"
            mail.setdefault((sender, peer), []).append(part)
    buffers = []
    for receiver, exchange in enumerate(exchanges):
        parts = []
        for peer, start, count in exchange.recv.tolist():
            assert start == sum(map(len, parts)), "the buffer fills from the front"
            parts.append(mail[peer, receiver].pop(0))
            assert len(parts[-1]) == count, "both sides agree on the count"
        buffers.append(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))
        assert len(buffers[-1]) == exchange.tokens
    assert not any(mail.values()), "all that is sent is received"
    return buffers


def attended(plan):
    """int[q_len, k_len]: how often the ranks' calls attend each pair, in global indices."""
    ranks = range(plan.group_size)
    count = np.zeros((plan.mask.q_len, plan.mask.k_len), dtype=int)
    own_rows = [plan.q_layout.positions(r) for r in ranks]
    own_keys = [plan.k_layout.positions(r) for r in ranks]
    guest_rows = fetched([plan.rank(r).q for r in ranks], own_rows)
    for n in range(plan.n_stages):
        stages = [plan.rank(r).stages[n] for r in ranks]
        local = all(stage.kv is None for stage in stages)
        assert local or all(stage.kv is not None for stage in stages)
        keys = own_keys if local else fetched([stage.kv for stage in stages], own_keys)
        for r, stage in enumerate(stages):
            for rows, slices in ((own_rows[r], stage.own), (guest_rows[r], stage.guest)):
                for one in slices:
                    seen = to_dense(one[None], len(rows), len(keys[r]))
                    count[np.ix_(rows, keys[r])] += seen
    return count


@over_plans
def test_calls_attend_every_pair_of_the_mask_once(mask, assignment, stages):
    for plan in plans(mask, assignment, stages):
        assert (attended(plan) == mask.to_dense()).all(), plan.report()
        assert sum(plan.rank(r).area for r in range(plan.group_size)) == mask.area


@over_plans
def test_keys_move_once_and_only_where_needed(mask, assignment, stages):
    for plan in plans(mask, assignment, stages):
        for rank in range(plan.group_size):
            own = set(plan.k_layout.positions(rank).tolist())
            needed, received = needed_keys(plan, rank), received_keys(plan, rank)
            assert len(received) == len(set(received)), plan.report()
            assert set(received) == (needed if plan.gathered else needed - own), plan.report()


@pytest.mark.parametrize("group_size", [2, 3])
def test_coarse_cuts_attend_every_pair_once(group_size):
    """Long shards are cut at multiples of a granule, short ones above anywhere."""
    mask = AttnMask.dense(1500, causal=True)
    plan = make_plan(mask, Layout.contiguous(1500, group_size))
    assert plan.q_tokens().sum() > 0
    cuts = plan.assignment[:, ROW0] % Layout.contiguous(1500, group_size).sizes[0]
    assert (cuts % 4 == 0).all()
    assert (attended(plan) == mask.to_dense()).all()


def test_moves_do_not_depend_on_how_the_mask_is_cut():
    """A rank asks once for keys that several slices need, or that touch."""
    whole = AttnMask.dense(40, causal=True)
    cut = AttnMask.from_slices(
        [(q, q + 8, k, k + 5, -40, 0) for q in range(0, 40, 8) for k in range(0, 40, 5)], 40, 40
    )
    assert len(cut.slices) > 8 and (cut.to_dense() == whole.to_dense()).all()
    for stages in (0, 1):
        a, b = (make_plan(m, Layout.zigzag(40, 4), stages=stages) for m in (whole, cut))
        assert a.kv_moves.tolist() == b.kv_moves.tolist()


def needed_keys(plan, rank):
    """Keys that some row computed by ``rank`` attends, from the dense mask."""
    rows = np.zeros(plan.mask.q_len, dtype=bool)
    for compute, _, row0, row1, _ in plan.assignment.tolist():
        rows[row0:row1] |= compute == rank
    return set(np.flatnonzero(plan.mask.to_dense()[rows].any(axis=0)).tolist())


def received_keys(plan, rank):
    """Keys that are sent to ``rank``, each from where it lies."""
    received = []
    for move in plan.kv_moves[plan.kv_moves[:, RECV] == rank].tolist():
        keys = range(move[KEY0], move[KEY1])
        held = plan.k_layout.positions(move[SEND])[move[SEND_OFFSET] :][: len(keys)]
        assert held.tolist() == list(keys)
        received += keys
    return received


@over_plans
def test_every_row_is_computed_once_from_where_it_lies(mask, assignment, stages):
    for plan in plans(mask, assignment, stages):
        rows = plan.assignment[plan.assignment[:, ROW0].argsort()]
        assert (rows[:, ROW0] < rows[:, ROW1]).all()
        assert [0, *rows[:, ROW1]] == [*rows[:, ROW0], mask.q_len]
        for _, owner, row0, row1, offset in rows.tolist():
            held = plan.q_layout.positions(owner)[offset : offset + row1 - row0]
            assert held.tolist() == list(range(row0, row1))


def imbalance(plan) -> float:
    """As the report says, after checking what it says."""
    areas = [plan.rank(r).area for r in range(plan.group_size)]
    label, _, ratio = plan.report().splitlines()[-1].partition(": ")
    assert label == "imbalance (largest / mean)"
    assert ratio == f"{max(areas) * len(areas) / sum(areas):.3f}"
    return float(ratio)


def test_balance_of_contiguous_causal():
    mask, layout = AttnMask.dense(8192, causal=True), Layout.contiguous(8192, 8)
    owner = make_plan(mask, layout, assignment="owner")
    assert imbalance(owner) > 1.8 and owner.q_tokens().sum() == 0
    balanced = make_plan(mask, layout)
    assert imbalance(balanced) <= 1.1
    assert balanced.q_tokens()[:, 0].max() <= 8192 // 8, "no rank gives more than it holds"
    zigzag = make_plan(mask, layout, assignment="zigzag")
    assert imbalance(zigzag) == 1.0
    assert balanced.q_tokens().sum() < zigzag.q_tokens().sum()


@pytest.mark.parametrize(
    ("mask", "layout", "limit"),
    [
        (AttnMask.dense(8192, window=(1024, 0)), Layout.contiguous(8192, 8), 1.05),
        (AttnMask.varlen([0, 6000, 6100, 8192], causal=True), Layout.contiguous(8192, 8), 1.05),
        (AttnMask.dense(8192, causal=True), Layout.from_sizes([8000, 0, 192, 0]), 1.05),
        (AttnMask.dense(1024, 4096, causal=True), Layout.contiguous(1024, 2), 1.05),
        (AttnMask.dense(100, causal=True), Layout.contiguous(100, 8), 1.1),
    ],
)
def test_balance_of_other_masks(mask, layout, limit):
    keys = Layout.contiguous(mask.k_len, layout.group_size)
    before = imbalance(make_plan(mask, layout, keys, assignment="owner"))
    assert imbalance(make_plan(mask, layout, keys)) <= min(limit, before)


@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_balanced_shards_move_no_rows(group_size):
    causal, full = AttnMask.dense(8192, causal=True), AttnMask.dense(8192)
    for mask, layout in ((causal, Layout.zigzag), (full, Layout.contiguous)):
        plan = make_plan(mask, layout(8192, group_size))
        assert plan.q_tokens().tolist() == [[0, 0]] * group_size
        assert (plan.assignment[:, COMPUTE] == plan.assignment[:, OWNER]).all()
        assert imbalance(plan) == 1.0


def test_window_receives_a_halo_only():
    plan = make_plan(
        AttnMask.dense(8192, window=(100, 0)), Layout.contiguous(8192, 8), assignment="owner"
    )
    assert plan.kv_tokens()[:, 1].tolist() == [0] + [100] * 7
    assert plan.kv_tokens()[:, 0].tolist() == [100] * 7 + [0]


def test_documents_within_shards_move_nothing():
    plan = make_plan(AttnMask.varlen([0, 10, 16, 32]), Layout.contiguous(32, 2), assignment="owner")
    assert not plan.gathered and plan.n_stages == 1 and len(plan.kv_moves) == 0
    assert plan.forward_bytes(4, 2, 64, None, 2).sum() == 0
    assert plan.backward_bytes(4, 2, 64, None, 2).sum() == 0


def test_default_stages():
    def default(tokens):
        return make_plan(AttnMask.dense(tokens, causal=True), Layout.zigzag(tokens, 2))

    assert default(GATHER_TOKENS).gathered and default(GATHER_TOKENS).n_stages == 1
    longer = default(GATHER_TOKENS + 4)
    assert not longer.gathered and longer.n_stages == 2


def test_stages_go_by_ring_distance():
    plan = make_plan(AttnMask.dense(64), Layout.contiguous(64, 8), stages=3)
    distance = (plan.kv_moves[:, SEND] - plan.kv_moves[:, RECV]) % 8
    stage_at = dict(zip(distance.tolist(), plan.kv_moves[:, STAGE].tolist(), strict=True))
    assert stage_at == {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3}
    assert plan.n_stages == 4


def test_plans_are_cached_by_value():
    def build(**options):
        mask = AttnMask.varlen([0, 20, 50], causal=True)
        return make_plan(mask, Layout.contiguous(50, 4), Layout.zigzag(50, 4), **options)

    assert build() is build()
    assert build() is build(assignment="balanced", stages=None)
    assert build() is not build(assignment="owner")
    assert build() is not build(stages=2)
    assert build().rank(2) is build().rank(2)


def test_plans_are_deterministic():
    def tables():
        plan_module._make_plan.cache_clear()
        mask = AttnMask.dense(1000, causal=True, window=(300, 0))
        plan = make_plan(mask, Layout.contiguous(1000, 7), stages=2)
        ranks = [plan.rank(r) for r in range(7)]
        parts = [plan.assignment, plan.kv_moves]
        for mine in ranks:
            parts += [mine.q.send, mine.q.recv]
            for stage in mine.stages:
                parts += [stage.own, stage.guest]
                parts += [] if stage.kv is None else [stage.kv.send, stage.kv.recv]
        return plan, [part.tolist() for part in parts]

    (first, first_tables), (second, second_tables) = tables(), tables()
    assert first is not second
    assert first_tables == second_tables


REPORT = """\
20 queries x 20 keys, 210 pairs, 4 ranks, q contiguous:20:4, k contiguous:20:4, gathered
rank   tokens          pairs  of mean  calls    kv in  rows in      sends   receives
   0        5             54    1.029      2       15        2    6.2 KiB    6.6 KiB
   1        5             55    1.048      2       10        1    5.9 KiB    4.2 KiB
   2        5             50    0.952      1       10        0    6.1 KiB    4.0 KiB
   3        5             51    0.971      1       15        0    2.9 KiB    6.2 KiB
imbalance (largest / mean): 1.048
"""


def test_report():
    layout = Layout.contiguous(20, 4)
    plan = make_plan(AttnMask.dense(20, causal=True), layout)
    got = plan.report(q_heads=4, kv_heads=2, head_dim=64, v_dim=32, itemsize=2)
    assert f"{got}\n" == REPORT


def test_report_of_nothing():
    plan = make_plan(AttnMask.from_slices([], 3, 3), Layout.from_sizes([1, 2]), stages=2)
    assert plan.report().splitlines()[0] == (
        "3 queries x 3 keys, 0 pairs, 2 ranks, q sizes:1,2, k sizes:1,2, 1 stages"
    )
    assert plan.report().splitlines()[-1] == "imbalance (largest / mean): 1.000"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


CAUSAL8 = AttnMask.dense(8, causal=True)
HALVES = Layout.contiguous(8, 2)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (
            (CAUSAL8, Layout.contiguous(6, 2)),
            {},
            LayoutError,
            "the mask is 8 queries x 8 keys, but the layouts hold 6 and 6 tokens",
        ),
        (
            (CAUSAL8, HALVES, Layout.contiguous(9, 2)),
            {},
            LayoutError,
            "the mask is 8 queries x 8 keys, but the layouts hold 8 and 9 tokens",
        ),
        (
            (CAUSAL8, HALVES, Layout.contiguous(8, 4)),
            {},
            LayoutError,
            "q lies on 2 ranks and k on 4",
        ),
        ((CAUSAL8, HALVES), {"stages": -1}, ValueError, "stages must be 0 or more, got -1"),
        (
            (CAUSAL8, HALVES),
            {"assignment": "best"},
            ValueError,
            "assignment must be owner, balanced or zigzag, got 'best'",
        ),
    ],
)
def test_errors(arguments, options, error, message):
    with pytest.raises(error) as info:
        make_plan(*arguments, **options)
    assert str(info.value) == message


WITHOUT_TORCH = """
import sys, types
sys.modules["torch"] = None  # importing it is an error from here on
for name, path in {packages!r}:
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [path]
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
plan = make_plan(AttnMask.dense(64, causal=True), Layout.contiguous(64, 4))
print(sum(plan.rank(r).area for r in range(4)))
"""


def test_planning_needs_no_torch():
    """The packages' own __init__ files import the ops, hence torch, so empty ones stand in."""
    core = Path(plan_module.__file__).parent
    packages = [
        ("customized_ops", str(core.parent.parent)),
        ("customized_ops.ring_attention", str(core.parent)),
    ]
    program = WITHOUT_TORCH.format(packages=packages)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{64 * 65 // 2}\n"
