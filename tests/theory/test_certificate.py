import math
import time
from contextlib import nullcontext

import pytest
import torch
from theory_cases import F64, masked

import torch_occ as occ
from torch_occ import theory
from torch_occ.game.losses import mean_square
from torch_occ.theory import certificate as module
from torch_occ.theory.certificate import interpolation_weights, running_weights

MDP = occ.LayeredMDP.random(3, 2, 3, seed=1)
MEAN = torch.rand(MDP.num_states, MDP.num_actions, dtype=F64, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def one_chunk_at_a_time(monkeypatch):
    """So that short runs are saved on the way."""
    monkeypatch.setattr("torch_occ.game.compiled_player.EnginePlayer.chunks", 1)


def play(episodes, *callbacks, mdp=MDP, mean=MEAN, losses=None, **options):
    learner = options.pop("learner", None) or occ.FTRL(mdp, occ.jin_luo(mdp))
    losses = occ.BernoulliLosses(mean) if losses is None else losses
    return occ.simulate(mdp, learner, losses, episodes, range(3), callbacks=callbacks, **options)


def test_with_every_checkpoint_the_sums_are_exact():
    certificate, recorder, T = theory.Certificate(), theory.Recorder(), 40
    history = play(T, certificate, recorder, checkpoints=range(1, T + 1))
    parameters, q = certificate.parameters, recorder.trajectory.q
    plan = occ.optimal_policy(MDP, history.total_mean)
    best = occ.occupancy(MDP, plan.policy)
    t = torch.arange(1, T + 1, dtype=F64).unsqueeze(-1)
    found = {name: curve[..., -1] for name, curve in certificate.curves.items()}

    penalty = theory.hybrid(MDP, best, parameters.alpha) - theory.hybrid(MDP, q, parameters.alpha)
    limit = theory.penalty_bound(MDP, q, best, plan.policy, parameters.alpha)
    inverse = theory.inverse_hessian(MDP, theory.curvature(MDP, q, parameters.alpha))
    norms = theory.expected_norm(MDP, q, inverse, MEAN.expand_as(q), MEAN.expand_as(q))
    expected = {
        "regret": history.regret[:, -1],
        "penalty": (parameters.eta_step(t) * penalty).sum(0),
        "penalty_bound": (parameters.eta_step(t) * limit).sum(0),
        "stability": 8 * (parameters.eta(t) * norms).sum(0),
        "stability_first_step": 8 * (parameters.eta(t) * theory.first_step_bound(MDP, q, parameters.alpha)).sum(0),
        "stability_bound": 8 * (parameters.eta(t) * theory.stability_bound(MDP, q, plan.policy, parameters.alpha)).sum(0),
        "stability_now_first_step": theory.first_step_bound(MDP, q[-1], parameters.alpha),
        "penalty_now": penalty[-1],
        "penalty_now_bound": limit[-1],
        "stability_now": norms[-1],
        "stability_now_bound": theory.stability_bound(MDP, q[-1], plan.policy, parameters.alpha),
        "lower_order": theory.lower_order(MDP, parameters, torch.tensor(float(T), dtype=F64)).expand(3),
        "bound_adversarial": theory.adversarial_bound(MDP, parameters, torch.tensor(float(T), dtype=F64)).expand(3),
    }
    expected["bound_terms"] = expected["penalty"] + expected["stability"] + expected["lower_order"]
    expected["bound_lemmas"] = expected["penalty_bound"] + expected["stability_bound"] + expected["lower_order"]
    tilde = theory.decompose(MDP, parameters, recorder.trajectory, q[0]).tilde_q[-1] / q[-1]
    expected |= {"smoothness_max": tilde.amax((-2, -1)), "smoothness_min": tilde.amin((-2, -1))}
    assert {*found} == {*expected, "episodes"}
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=2e-6 if name.startswith("smooth") else 1e-9, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert certificate.curves["episodes"].tolist() == list(range(1, T + 1))


def test_between_checkpoints_the_sums_are_close():
    """Default checkpoints against one in every episode, same seeds: the sums agree to a per cent, the rest exactly."""
    sparse, dense, T = theory.Certificate(), theory.Certificate(), 120
    play(T, sparse)
    play(T, dense, checkpoints=range(1, T + 1))
    assert len(sparse.curves["episodes"]) < 40
    for name in ("penalty", "stability", "penalty_bound", "stability_bound", "stability_first_step"):
        a, b = sparse.curves[name][:, -1], dense.curves[name][:, -1]
        torch.testing.assert_close(a, b, rtol=0.01, atol=0)
    for name in ("penalty_now", "stability_now", "lower_order", "regret", "smoothness_max"):
        torch.testing.assert_close(sparse.curves[name][:, -1], dense.curves[name][:, -1], rtol=1e-9, atol=0)


def test_the_bounds_are_in_order_at_every_checkpoint():
    certificate = theory.Certificate()
    play(300, certificate)
    found = certificate.curves
    assert bool((found["regret"] <= found["bound_terms"]).all())
    assert bool((found["bound_terms"] <= found["bound_lemmas"]).all())
    assert bool((found["bound_lemmas"] <= found["bound_adversarial"]).all())
    assert bool((found["penalty_now"] <= found["penalty_now_bound"]).all())
    assert bool((found["stability"] <= found["stability_first_step"]).all())
    assert bool(((found["smoothness_max"] >= 1) & (found["smoothness_max"] < 2)).all())
    assert bool(((found["smoothness_min"] <= 1) & (found["smoothness_min"] > 0.5)).all())


def test_weights_of_the_interpolation():
    eta = 1 / torch.arange(11, 101, dtype=F64).sqrt()
    left, right = interpolation_weights(10, 100, eta)
    assert left + right == pytest.approx(float(eta.sum()))
    t = torch.arange(11, 101, dtype=F64)
    assert left * math.log(10) + right * math.log(100) == pytest.approx(float((eta * t.log()).sum()))  # exact for what is linear in log t
    assert interpolation_weights(41, 42, torch.tensor([3.0], dtype=F64)) == (0.0, 3.0)
    assert interpolation_weights(0, 2, torch.tensor([3.0, 4.0], dtype=F64)) == (0.0, 7.0)


def test_running_weights():
    """Row i sums up to the i-th checkpoint; with every checkpoint there is nothing to interpolate."""
    episodes = torch.tensor([1, 2, 3, 10, 40])
    found = running_weights(episodes, torch.rsqrt)
    totals = [float(torch.arange(1, int(t) + 1, dtype=F64).rsqrt().sum()) for t in episodes]
    assert found.sum(-1).tolist() == pytest.approx(totals)
    assert not bool(found.triu(1).any())
    every = running_weights(torch.arange(1, 6), torch.rsqrt)
    torch.testing.assert_close(every, torch.arange(1, 6, dtype=F64).rsqrt().expand(5, -1).tril())


@pytest.mark.parametrize("noise", ["none", "bernoulli", "uniform"])
def test_second_moments(noise):
    process = occ.LossProcess()
    process.noise = noise
    mean = torch.tensor([0.1, 0.5, 0.8], dtype=F64)
    uniform = (torch.arange(100_000, dtype=F64).unsqueeze(-1) + 0.5) / 100_000
    drawn = process.draw(mean.expand(100_000, 3), uniform.expand(-1, 3))
    torch.testing.assert_close(mean_square(mean, noise), drawn.square().mean(0), rtol=1e-4, atol=0)


def test_means_that_change_are_averaged_since_the_last_checkpoint():
    table = torch.zeros(4, MDP.num_states, MDP.num_actions, dtype=F64)
    table[:, :, 0] = torch.tensor([0.2, 0.4, 0.6, 1.0], dtype=F64).unsqueeze(-1)
    certificate = theory.Certificate()
    history = play(4, certificate, losses=occ.TableLosses(table), checkpoints=[2, 4])
    mean = table[2:].mean(0).expand(3, -1, -1)
    inverse = theory.inverse_hessian(MDP, theory.curvature(MDP, history.last_q, certificate.parameters.alpha))
    expected = theory.expected_norm(MDP, history.last_q, inverse, mean, mean.square())
    torch.testing.assert_close(certificate.curves["stability_now"][:, -1], expected, rtol=1e-10, atol=0)


def test_masks_and_states_of_one_action():
    mdp = masked()
    mean = torch.rand(mdp.num_states, mdp.num_actions, dtype=F64, generator=torch.Generator().manual_seed(0))
    certificate = theory.Certificate()
    play(50, certificate, mdp=mdp, mean=mean)
    assert all(bool(curve.isfinite().all()) for curve in certificate.curves.values())
    assert bool((certificate.curves["regret"] <= certificate.curves["bound_terms"]).all())


# -- TensorBoard, saving, errors ------------------------------------------------------------------------------------------


def read(directory):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return event_accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()


def test_tensorboard_shows_every_curve(tmp_path):
    board = occ.TensorBoard(tmp_path, images_per_decade=0)
    certificate = theory.Certificate(board)
    play(30, board, certificate)
    found, curves = read(tmp_path), certificate.curves
    tags = {tag for tag in found.Tags()["scalars"] if tag.startswith("theory/")}
    assert tags == {f"theory/{name}" for name in curves if name != "episodes"}
    for name, curve in curves.items():
        if name != "episodes":
            events = found.Scalars(f"theory/{name}")
            assert [event.step for event in events] == curves["episodes"].tolist()
            over_seeds = {"smoothness_max": curve.amax(0), "smoothness_min": curve.amin(0)}.get(name, curve.mean(0))
            torch.testing.assert_close(torch.tensor([event.value for event in events]), over_seeds.float())


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


@pytest.mark.parametrize("moved", [False, True], ids=["same directory", "fresh directory"])
def test_a_resumed_run_has_every_point_once_on_the_board(tmp_path, moved):
    options = {"checkpoints": [1, 50, 250, 280, 300, 320], "save_to": tmp_path / "run.pt", "save_every": 0.0}
    for attempt in range(2):
        board = occ.TensorBoard(tmp_path / ("other" if moved and attempt else "log"), images_per_decade=0)
        with pytest.raises(MemoryError) if attempt == 0 else nullcontext():
            play(320, board, theory.Certificate(board), *([Killed()] if attempt == 0 else []), **options)
        board.writer.close()
        time.sleep(1.01 - time.time() % 1)  # event files are read in the order of their names, which count seconds
    found = read(board.directory).Scalars("theory/penalty")
    assert [event.step for event in found] == options["checkpoints"]


@pytest.mark.parametrize(("together", "patience"), [(1, 2.0), (5, 2.0), (1000, 0.0)])
def test_evaluating_together_or_one_by_one_makes_no_difference(monkeypatch, together, patience):
    expected, found = theory.Certificate(), theory.Certificate()
    play(300, expected)
    monkeypatch.setattr(module, "TOGETHER", together)
    monkeypatch.setattr(module, "PATIENCE", patience)
    play(300, found)
    assert len(found.known) != len(expected.known)
    for name, curve in expected.curves.items():
        torch.testing.assert_close(found.curves[name], curve, rtol=2e-6 if name.startswith("smooth") else 1e-12, atol=0)


class Interrupted(occ.Callback):
    def on_checkpoint(self, run):
        if run.t == 20:
            raise KeyboardInterrupt


def test_an_interrupted_run_shows_what_it_had(tmp_path):
    board = occ.TensorBoard(tmp_path, images_per_decade=0)
    certificate = theory.Certificate(board)
    with pytest.raises(KeyboardInterrupt):
        play(300, board, certificate, Interrupted())
    assert certificate.curves["episodes"].tolist()[-1] == 20
    time.sleep(1.01)
    assert read(tmp_path).Scalars("theory/regret")[-1].step == 20


def test_a_run_begun_without_it_cannot_be_continued_with_it(tmp_path):
    kept = {"save_to": tmp_path / "run.pt", "save_every": 0.0, "checkpoints": [1, 50, 300, 320]}
    with pytest.raises(MemoryError):
        play(320, Killed(), **kept)
    with pytest.raises(ValueError, match="begun without the certificate"):
        play(320, theory.Certificate(), **kept)


def test_a_board_that_comes_later_is_an_error_before_the_first_episode(tmp_path):
    board = occ.TensorBoard(tmp_path)
    certificate = theory.Certificate(board)
    assert certificate.curves == {}
    with pytest.raises(ValueError, match="must stand before the certificate"):
        play(5, certificate, board)


def test_other_learners_are_refused_before_the_first_episode():
    with pytest.raises(ValueError, match="make it with jin_luo"):
        play(5, theory.Certificate(), learner=occ.FTRL.tsallis(MDP))
