"""Numbers about a belief, against loops, and in TensorBoard."""

import pytest
import torch
from zoo import PROBLEMS, Kept, random_loss

import torch_occ as occ
from torch_occ.mdp.occupancy import policy_of

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def test_numbers_by_hand():
    mdp = PROBLEMS["masked"]().mdp
    losses, kept = occ.BernoulliLosses(random_loss(mdp)), Kept()
    learner = occ.rivals.UnknownFTRL.practical(mdp)
    history = occ.simulate(mdp, learner, losses, 30, range(3), callbacks=[kept])
    learner, q = kept.learner, history.last_q
    found = learner.monitor(mdp, q)
    errors, played, held = [], 0.0, 0
    for n in range(3):
        inside = True
        for s in range(mdp.num_states):
            k = int(mdp.layer[s])
            local = s - mdp.layer_slices[k].start
            for a in range(mdp.num_actions):
                if bool(mdp.actions[s, a]) and k + 1 < mdp.horizon:
                    believed = learner.transitions()[k][n, local, a]
                    error = (believed - mdp.transitions[k][local, a]).abs()
                    errors.append(float(error.sum()))
                    played += float(q[n, s, a] * error.sum()) / 3 / (mdp.horizon - 1)
                    inside &= bool((error <= learner.confidence()[k][n, local, a]).all())
        held += inside
    assert found["l1_error"] == pytest.approx(sum(errors) / len(errors))
    assert found["l1_error_played"] == pytest.approx(played)
    assert found["coverage"] == pytest.approx(held / 3)
    assert found["epochs"] == float(learner.state["epochs"].mean())
    u = occ.rivals.upper_occupancy(
        mdp, policy_of(mdp, q), learner.transitions(), learner.confidence()
    )
    assert found["upper_bound"] == pytest.approx(float(u.mean()))
    assert found["occupancy"] == pytest.approx(mdp.horizon / mdp.num_states)
    assert found["bonus"] == pytest.approx(float(learner.state["bonus"][:, mdp.actions].mean()))


def test_learners_without_a_belief_have_no_numbers():
    mdp = PROBLEMS["layers"]().mdp
    assert occ.FixedPolicy(mdp).monitor(mdp, occ.interior_point(mdp)[None]) == {}
    plug_in = occ.rivals.UnknownFTRL(mdp, occ.jin_luo(mdp))
    plug_in.start(2)
    q = occ.interior_point(mdp).expand(2, -1, -1)
    assert set(plug_in.monitor(mdp, q)) == {"epochs", "l1_error", "l1_error_played"}
    assert set(plug_in.monitor(mdp.to_sparse(), q)) > {"epochs"}
    bandit = occ.LayeredMDP([torch.ones(1, 3, 1, dtype=torch.float64)])
    one_layer = occ.rivals.UnknownFTRL(bandit, occ.jin_luo(bandit))
    one_layer.start(1)
    assert one_layer.monitor(bandit, occ.interior_point(bandit)[None]) == {"epochs": 1.0}


def test_tensorboard_shows_the_belief(tmp_path):
    mdp = PROBLEMS["layers"]().mdp
    losses = occ.BernoulliLosses(random_loss(mdp))
    board = occ.TensorBoard(tmp_path, images_per_decade=0)
    occ.simulate(
        mdp, occ.rivals.UnknownFTRL.practical(mdp), losses, 200, range(2), callbacks=[board]
    )
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("belief/")}
    names = ("epochs", "l1_error", "l1_error_played", "coverage", "bonus", "upper_bound")
    assert tags == {f"belief/{name}" for name in (*names, "occupancy")}
    points = [event.value for event in events.Scalars("belief/l1_error_played")]
    assert points[-1] < points[0]
