import pytest
import torch
from theory_cases import F64, masked

import torch_occ as occ
from torch_occ import theory
from torch_occ.game.losses import Stationary, mean_square

MDP = occ.LayeredMDP.random(3, 2, 3, seed=1)
MEAN = torch.rand(MDP.actions.shape, dtype=F64, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def one_chunk_at_a_time(monkeypatch):
    """So that short runs are saved on the way."""
    monkeypatch.setattr("torch_occ.game.players.EnginePlayer.chunks", 1)


def play(episodes, *callbacks, mdp=MDP, mean=MEAN, losses=None, **options):
    learner = options.pop("learner", None) or occ.FTRL(mdp, occ.jin_luo(mdp))
    losses = occ.BernoulliLosses(mean) if losses is None else losses
    return occ.simulate(mdp, learner, losses, episodes, range(3), callbacks=callbacks, **options)


def test_with_every_checkpoint_the_sums_are_exact():
    certificate, recorder, T = theory.Certificate(), theory.Recorder(), 40
    history = play(T, certificate, recorder, checkpoints=range(1, T + 1))
    parameters, q = certificate.parameters, recorder.trajectory.q
    alpha, plan = parameters.alpha, occ.optimal_policy(MDP, history.total_mean)
    best, end = occ.occupancy(MDP, plan.policy), torch.full((3,), float(T), dtype=F64)
    t = torch.arange(1, T + 1, dtype=F64).unsqueeze(-1)
    found = {name: curve[..., -1] for name, curve in certificate.curves.items()}

    penalty = theory.hybrid(MDP, best, alpha) - theory.hybrid(MDP, q, alpha)
    limit = theory.penalty_bound(MDP, q, best, plan.policy, alpha)
    inverse = theory.inverse_hessian(MDP, theory.curvatures.curvature(MDP, q, alpha))
    norms = theory.expected_norm(MDP, q, inverse, MEAN.expand_as(q), MEAN.expand_as(q))
    first_step = theory.terms.first_step_bound(MDP, q, alpha)
    adaptive = theory.stability_bound(MDP, q, plan.policy, alpha)
    expected = {
        "regret": history.regret[:, -1],
        "penalty": (parameters.eta_step(t) * penalty).sum(0),
        "penalty_bound": (parameters.eta_step(t) * limit).sum(0),
        "stability": 8 * (parameters.eta(t) * norms).sum(0),
        "stability_first_step": 8 * (parameters.eta(t) * first_step).sum(0),
        "stability_bound": 8 * (parameters.eta(t) * adaptive).sum(0),
        "stability_now_first_step": first_step[-1],
        "penalty_now": penalty[-1],
        "penalty_now_bound": limit[-1],
        "stability_now": norms[-1],
        "stability_now_bound": adaptive[-1],
        "lower_order": theory.lower_order(MDP, parameters, end),
        "bound_adversarial": theory.adversarial_bound(MDP, parameters, end),
    }
    rest = expected["lower_order"]
    expected["bound_terms"] = expected["penalty"] + expected["stability"] + rest
    expected["bound_lemmas"] = expected["penalty_bound"] + expected["stability_bound"] + rest
    tilde = theory.decompose(MDP, parameters, recorder.trajectory, q[0]).tilde_q[-1] / q[-1]
    expected |= {"smoothness_max": tilde.amax((-2, -1)), "smoothness_min": tilde.amin((-2, -1))}
    # All seeds have the same means, so that their best policies are one.
    shared = "regret penalty penalty_bound stability_bound bound_terms bound_lemmas"
    expected |= {f"{name}_shared": expected[name] for name in shared.split()}
    assert {*found} == {*expected, "episodes"}
    for name, value in expected.items():
        rtol = 2e-6 if name.startswith("smooth") else 1e-9
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=0, msg=name)
    assert certificate.curves["episodes"].tolist() == list(range(1, T + 1))


@pytest.mark.parametrize("mdp", [MDP, masked()], ids=["full", "masked"])
def test_the_bounds_are_in_order_at_every_checkpoint(mdp):
    certificate, generator = theory.Certificate(), torch.Generator().manual_seed(0)
    mean = torch.rand(mdp.actions.shape, dtype=F64, generator=generator)
    play(300, certificate, mdp=mdp, mean=mean)
    found = certificate.curves
    assert all(bool(curve.isfinite().all()) for curve in found.values())
    assert bool((found["regret"] <= found["bound_terms"]).all())
    assert bool((found["bound_terms"] <= found["bound_lemmas"]).all())
    assert bool((found["bound_lemmas"] <= found["bound_adversarial"]).all())
    assert bool((found["penalty_now"] <= found["penalty_now_bound"]).all())
    assert bool((found["stability"] <= found["stability_first_step"]).all())
    assert bool(((found["smoothness_max"] >= 1) & (found["smoothness_max"] < 2)).all())
    assert bool(((found["smoothness_min"] <= 1) & (found["smoothness_min"] > 0.5)).all())


@pytest.mark.parametrize("noise", ["none", "bernoulli", "uniform"])
def test_second_moments(noise):
    process = occ.LossProcess()
    process.noise = noise
    mean = torch.tensor([0.1, 0.5, 0.8], dtype=F64)
    uniform = (torch.arange(100_000, dtype=F64).unsqueeze(-1) + 0.5) / 100_000
    drawn = process.draw(mean.expand(100_000, 3), uniform.expand(-1, 3))
    torch.testing.assert_close(mean_square(mean, noise), drawn.square().mean(0), rtol=1e-4, atol=0)


# -- losses that move ------------------------------------------------------------------------------


def switching(period=1):
    """0/1 losses, half of the pairs against the other half, that change sides all the time."""
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(MDP.actions.shape, dtype=F64, generator=generator).round()
    return occ.SwitchingLosses(torch.stack([table, 1 - table]), period)


def together():
    """All losses are 0 in one episode and 1 in the next: products of means are far from means."""
    table = torch.ones(MDP.num_states, MDP.num_actions, dtype=F64)
    return occ.SwitchingLosses(torch.stack([table, 0 * table]), 1)


def losses_played(losses, q):
    """The losses of every episode `(T, N, S, A)` of a process without noise, from all q_t."""
    state, found = losses.start(MDP, range(q.shape[1])), []
    last = occ.interior_point(MDP).expand_as(q[0])
    for t in range(1, len(q) + 1):
        mean, state = losses.means(MDP, state, t, 1, last)
        found.append(mean[0].expand_as(q[0]))
        last = q[t - 1]
    return torch.stack(found)


@pytest.mark.parametrize(
    ("losses", "backend"),
    [(switching(3), "engine"), (together(), "torch"), (occ.GreedyAdversary(), "engine")],
)
def test_the_stability_of_moving_losses_is_that_of_every_episode(losses, backend):
    """Against a sum over all episodes, each with its own losses and its own inverse Hessian."""
    certificate, recorder, T = theory.Certificate(), theory.Recorder(), 80
    play(T, certificate, losses=losses, backend=backend)
    play(T, recorder, losses=losses, checkpoints=range(1, T + 1), backend=backend)
    q, parameters = recorder.trajectory.q, certificate.parameters
    loss, t = losses_played(losses, q), torch.arange(1, T + 1, dtype=F64).unsqueeze(-1)
    inverse = theory.inverse_hessian(MDP, theory.curvatures.curvature(MDP, q, parameters.alpha))
    norms = theory.expected_norm(MDP, q, inverse, loss, loss.square())
    expected = 8 * (parameters.eta(t) * norms).sum(0)
    found = certificate.curves["stability"][:, -1]
    torch.testing.assert_close(found, expected, rtol=0.005, atol=0)
    assert bool((certificate.curves["bound_terms"][:, -1] > found).all())


class Asks(occ.Callback):
    """Asks for second moments, and keeps their sum."""

    def on_start(self, run):
        run.ask_for_second_moments()

    def on_end(self, run, history):
        self.found = run.sums["second_moment"]


@pytest.mark.parametrize(
    ("noise", "backend", "learner", "moving"),
    [
        ("none", "engine", "ftrl", True),
        ("bernoulli", "engine", "leader", False),
        ("uniform", "engine", "fixed", True),
        ("bernoulli", "torch", "leader", True),
    ],
)
def test_second_moments_of_every_episode_are_added_up(noise, backend, learner, moving):
    generator, asks, T = torch.Generator().manual_seed(1), Asks(), 7
    tables = torch.rand(2, *MDP.actions.shape, dtype=F64, generator=generator)
    losses = occ.SwitchingLosses(tables, 1, noise) if moving else Stationary(tables[0], noise)
    learners = {"fixed": occ.FixedPolicy(MDP), "leader": occ.FollowTheLeader(MDP), "ftrl": None}
    play(T, asks, learner=learners[learner], losses=losses, backend=backend, checkpoints=[3, 7])
    pairs = MDP.num_states * MDP.num_actions
    expected = torch.zeros(pairs, pairs, dtype=F64)
    for t in range(T):
        mean = tables[t % 2 if moving else 0].flatten()
        outer = torch.outer(mean, mean).fill_diagonal_(0.0)
        expected += outer + mean_square(mean, noise).diag()
    torch.testing.assert_close(asks.found, expected.triu().expand(3, -1, -1), rtol=1e-13, atol=0)


# -- two comparators -------------------------------------------------------------------------------


def test_against_an_adaptive_adversary_the_shared_comparator_is_the_papers():
    """max E, the best policy for the mean over seeds of the cumulative losses, against E max."""
    certificate, recorder, T = theory.Certificate(), theory.Recorder(), 60
    losses = occ.GreedyAdversary()
    history = play(T, certificate, recorder, losses=losses, checkpoints=range(1, T + 1))
    q, curves = recorder.trajectory.q, certificate.curves
    loss, parameters = losses_played(losses, q), certificate.parameters
    torch.testing.assert_close(history.total_mean, loss.sum(0))

    plan = occ.optimal_policy(MDP, loss.sum(0).mean(0))
    best = occ.occupancy(MDP, plan.policy)
    regret = ((q - best) * loss).sum((0, -2, -1))
    torch.testing.assert_close(curves["regret_shared"][:, -1], regret)
    t = torch.arange(1, T + 1, dtype=F64).unsqueeze(-1)
    values = theory.hybrid(MDP, best, parameters.alpha) - theory.hybrid(MDP, q, parameters.alpha)
    penalty = (parameters.eta_step(t) * values).sum(0)
    torch.testing.assert_close(curves["penalty_shared"][:, -1], penalty)
    limit = theory.penalty_bound(MDP, q, best, plan.policy, parameters.alpha)
    limit = (parameters.eta_step(t) * limit).sum(0)
    torch.testing.assert_close(curves["penalty_bound_shared"][:, -1], limit)
    rest = penalty + curves["stability"][:, -1] + curves["lower_order"][:, -1]
    torch.testing.assert_close(curves["bound_terms_shared"][:, -1], rest)

    # No single policy is better on average than the best one of every seed, and here it is worse.
    own, shared = (curves[name].mean(0) for name in ("regret", "regret_shared"))
    assert bool((shared <= own + 1e-12).all())
    assert float(shared[-1]) < float(own[-1]) - 1
    means = {name: curves[f"{name}_shared"].mean(0) for name in ("bound_terms", "bound_lemmas")}
    assert bool((shared <= means["bound_terms"]).all())
    assert bool((means["bound_terms"] <= means["bound_lemmas"]).all())


# -- TensorBoard, saving, errors -------------------------------------------------------------------


def read(directory):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return events.EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()


@pytest.mark.parametrize("first", [True, False])
def test_tensorboard_shows_every_curve_before_and_after_it_in_the_list(tmp_path, first):
    board = occ.TensorBoard(tmp_path, images_per_decade=0)
    certificate = theory.Certificate()
    play(30, *((board, certificate) if first else (certificate, board)))
    found, curves = read(tmp_path), certificate.curves
    tags = {tag for tag in found.Tags()["scalars"] if tag.startswith("theory/")}
    assert tags == {f"theory/{name}" for name in curves if name != "episodes"}
    for name, curve in curves.items():
        if name != "episodes":
            events = found.Scalars(f"theory/{name}")
            assert [event.step for event in events] == curves["episodes"].tolist()
            extremes = {"smoothness_max": curve.amax(0), "smoothness_min": curve.amin(0)}
            shown = torch.tensor([event.value for event in events])
            torch.testing.assert_close(shown, extremes.get(name, curve.mean(0)).float())


class Killed(occ.Callback):
    def on_checkpoint(self, run):
        if run.t == 300:
            raise MemoryError


def test_a_resumed_run_goes_on_with_the_same_sums(tmp_path):
    options = {"checkpoints": [1, 50, 250, 280, 300, 320]}
    whole, first, rest = theory.Certificate(), theory.Certificate(), theory.Certificate()
    play(320, whole, **options)
    kept = {"save_to": tmp_path / "run.pt", "save_every": 0.0}
    with pytest.raises(MemoryError):
        play(320, first, Killed(), **kept, **options)  # saved at 256
    play(320, rest, **kept, **options)
    assert rest.curves["episodes"].tolist() == [1, 50, 250, 280, 300, 320]
    for name, curve in rest.curves.items():
        torch.testing.assert_close(curve, whole.curves[name], rtol=1e-12, atol=0)


def test_a_run_begun_without_it_cannot_be_continued_with_it(tmp_path):
    kept = {"save_to": tmp_path / "run.pt", "save_every": 0.0, "checkpoints": [1, 50, 300, 320]}
    with pytest.raises(MemoryError):
        play(320, Killed(), **kept)
    with pytest.raises(ValueError, match="begun without the certificate"):
        play(320, theory.Certificate(), **kept)
