"""What a rank receives, and in which stages it computes."""

from customized_ops.ring_attention.core.cost import CostModel
from customized_ops.ring_attention.core.layout import Layout
from customized_ops.ring_attention.core.mask import AttnMask
from customized_ops.ring_attention.core.plan import make_plan
from customized_ops.ring_attention.core.plan.moves import RECV, SEND, ring_stage

from .plan_cases import moves_of


def test_window_receives_a_halo_only():
    plan = make_plan(
        AttnMask.dense(8192, window=(100, 0)), Layout.contiguous(8192, 8), assignment="owner"
    )
    assert plan.kv_tokens()[:, 1].tolist() == [0] + [100] * 7
    assert plan.kv_tokens()[:, 0].tolist() == [100] * 7 + [0]


def test_documents_within_shards_move_nothing():
    plan = make_plan(AttnMask.varlen([0, 10, 16, 32]), Layout.contiguous(32, 2), assignment="owner")
    assert not plan.gathered and plan.n_stages == 1
    assert plan.kv_tokens().tolist() == plan.q_tokens().tolist() == [[0, 0]] * 2
    assert all(plan.rank(r).q.empty and plan.rank(r).stages[0].kv is None for r in range(2))
    assert plan.forward_bytes(4, 2, 64, None, 2).sum() == 0
    assert plan.backward_bytes(4, 2, 64, None, 2).sum() == 0


def test_default_stages():
    """Keys are gathered where so little is attended that the host would be what takes time."""

    def default(tokens, **options):
        return make_plan(AttnMask.causal(tokens), Layout.zigzag(tokens, 2), **options)

    for tokens in (256, 1024):
        assert default(tokens).gathered and default(tokens).n_stages == 1
    for tokens in (8192, 16384, 131072):
        assert not default(tokens).gathered and default(tokens).n_stages == 2
    assert default(8192, costs=CostModel(call_seconds=1e-3)).gathered
    assert not default(1024, costs=CostModel(call_seconds=0.0)).gathered
    alone = make_plan(AttnMask.varlen([0, 128, 256]), Layout.contiguous(256, 2))
    assert not alone.gathered and alone.n_stages == 1, "nothing moves"


def test_small_work_is_not_evened_out():
    """Moving rows is two calls more on a rank: on short documents that takes longer than it saves,
    but not on long ones."""

    def moved(scale):
        mask = AttnMask.varlen([scale * n for n in (0, 3, 4, 5, 6)], causal=True)
        return int(make_plan(mask, Layout.contiguous(6 * scale, 2)).q_tokens().sum())

    assert moved(256) == 0 < moved(8192)


def test_stages_go_by_ring_distance():
    plan = make_plan(AttnMask.dense(64), Layout.contiguous(64, 8), stages=3)
    moves = moves_of(plan)
    distance = (moves[:, SEND] - moves[:, RECV]) % 8
    stages = ring_stage(moves, 8, 3, 1)
    stage_at = dict(zip(distance.tolist(), stages.tolist(), strict=True))
    assert stage_at == {0: 0, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3}
    assert plan.n_stages == 4


def test_stages_of_teams_go_by_distance_of_teams():
    """The other ranks of one's own team are in the first remote stage; stage 0 is a rank's own."""
    plan = make_plan(AttnMask.dense(64), Layout.contiguous(64, 8), stages=3, team_size=2)
    moves = moves_of(plan)
    distance = (moves[:, SEND] // 2 - moves[:, RECV]) % 4
    stages = ring_stage(moves, 8, 3, 2)
    stage_at = dict(zip(distance.tolist(), stages.tolist(), strict=True))
    assert stage_at == {0: 1, 1: 1, 2: 2, 3: 3}
    assert plan.n_stages == 4
    assert plan.rank(3).stages[0].kv is None and plan.rank(3).stages[0].area > 0
