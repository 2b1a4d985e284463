"""The tuner: it finds what is known, resumes to the bit, and says what went wrong."""

import math
import os
from typing import ClassVar

import pytest
import torch
from torch.distributions import constraints
from zoo import played_regrets, random_problem

import torch_occ as occ
from torch_occ.tuning import Evaluation, ForecastObjective, Guard, World
from torch_occ.tuning.refine import HOPELESS, Search, trial_of
from torch_occ.tuning.tune import TuningBoard


def stochastic(seed, episodes, **options):
    """An MDP with its means, and the forecast regret there."""
    mdp, mean = random_problem(seed)
    return mdp, mean, ForecastObjective([World("stochastic", mdp, mean)], episodes, **options)


def referred(episodes):
    """The same with the paper's constants, which are also the reference."""
    psi = occ.jin_luo(random_problem(1)[0])
    return *stochastic(1, episodes, reference=psi), psi


def greedy(mdps, psi, apart=False, **options):
    """A guard against the adversary, with two seeds unless others are given."""
    names = [f"greedy {i}" if apart else "greedy" for i in range(len(mdps))]
    worlds = [World(*named, occ.GreedyAdversary()) for named in zip(names, mdps, strict=True)]
    return Guard(worlds, 100, psi, **({"seeds": (1, 2)} | options))


def named(psi):
    """The parameters by the last part of their names."""
    return {name.rpartition(".")[2]: x for name, x in psi.named_parameters()}


def bowl(regularizer):
    """A known minimum: log beta = 1, log gamma = -1, whatever alpha is."""
    own = {name: x.reshape(-1) for name, x in named(regularizer).items()}
    value = (own["beta"].log() - 1) ** 2 + (own["gamma"].log() + 1) ** 2 + 0 * own["alpha"]
    return Evaluation(value, {"bowl": value}, torch.ones_like(value, dtype=torch.bool))


def psi_of(**parameters):
    return occ.jin_luo(
        random_problem()[0], **({"alpha": 0.5, "beta": 20.0, "gamma": 1.0} | parameters)
    )


def test_a_known_minimum_is_found_from_every_start():
    found = occ.tune(bowl, psi_of(), steps=60, starts=3, rate=0.5)
    assert found.value < 1e-4
    assert found.parameters["terms.1.beta"] == pytest.approx(math.e, rel=0.02)
    assert found.parameters["terms.0.factor.gamma"] == pytest.approx(1 / math.e, rel=0.02)
    assert bool((found.values[-1] < 1e-2).all())
    assert found.finished
    assert found.at_bounds == ()
    psi = psi_of()
    found.load_into(psi)
    assert named(psi)["beta"].item() == found.parameters["terms.1.beta"]


def test_only_the_named_parameters_move():
    found = occ.tune(bowl, psi_of(), steps=10, starts=2, only=["beta"])
    assert list(found.parameters) == ["terms.1.beta"]
    with pytest.raises(ValueError, match="only: the regularizer has no parameter 'delta'"):
        occ.tune(bowl, psi_of(), only=["delta"])


def test_bounds_are_kept_and_reported():
    found = occ.tune(bowl, psi_of(), steps=60, starts=2, rate=0.4, bounds={"beta": (5.0, 100.0)})
    assert found.parameters["terms.1.beta"] == pytest.approx(5.0)
    assert found.at_bounds == ("terms.1.beta",)
    assert "(at its bound)" in str(found)
    with pytest.raises(ValueError, match=r"beta is 20, outside its bounds \(0.1, 1.0\)"):
        occ.tune(bowl, psi_of(), bounds={"beta": (0.1, 1.0)})
    with pytest.raises(ValueError, match=r"bounds: terms\.1\.beta must satisfy"):
        occ.tune(bowl, psi_of(), bounds={"beta": (0.0, 100.0)})


def broken_beyond(limit):
    def objective(regularizer):
        found = bowl(regularizer)
        beta = named(regularizer)["beta"][..., 0]
        return found._replace(value=torch.where(beta < limit, torch.nan, found.value))

    return objective


def test_an_objective_that_is_not_finite_is_reported_and_never_chosen():
    found = occ.tune(broken_beyond(10.0), psi_of(), steps=40, starts=2, rate=0.4, spread=0.1)
    assert int(found.failures.sum()) > 0
    assert found.values[found.failures].isnan().all()
    assert found.parameters["terms.1.beta"] >= 10
    assert "not finite or not certified" in str(found)
    with pytest.raises(RuntimeError, match="certified at any of 3 evaluations of 2 starts"):
        occ.tune(broken_beyond(math.inf), psi_of(), steps=2, starts=2)


def uncertified(found, _):
    return found._replace(certified=torch.arange(len(found.value)) > 0)


def without_gradient(found, beta):
    # zero, with a slope that is not finite
    spoilt = torch.cat([(beta[:1] - beta[:1]).sqrt(), torch.zeros_like(beta[1:])])
    return found._replace(value=found.value + spoilt)


@pytest.mark.parametrize("spoil", [uncertified, without_gradient])
def test_a_start_without_certificate_or_gradient_is_a_failure(spoil):
    def objective(regularizer):
        return spoil(bowl(regularizer), named(regularizer)["beta"][..., 0])

    found = occ.tune(objective, psi_of(), steps=5, starts=3)
    assert found.failures[:, 0].all()
    assert not found.failures[:, 1:].any()
    assert found.start > 0


@pytest.mark.bits
def test_resumed_equals_uninterrupted_to_the_bit(tmp_path):
    mdp, mean, objective = stochastic(0, 1000)
    whole = occ.tune(objective, psi_of(), steps=6, starts=2)

    class Interrupted(ForecastObjective):
        fingerprint_ignores = ("calls",)
        calls = 0

        def __call__(self, regularizer):
            self.calls += 1
            if self.calls == 4:
                raise KeyboardInterrupt
            return super().__call__(regularizer)

    objective = Interrupted([World("stochastic", mdp, mean)], 1000)
    path = tmp_path / "tuning.pt"
    with pytest.raises(KeyboardInterrupt) as caught:
        occ.tune(objective, psi_of(), steps=6, starts=2, save_to=path)
    part = caught.value.result
    assert caught.value.saved_to == path
    assert "stopped after 3 of 7 steps; saved to" in caught.value.__notes__[0]
    assert not part.finished
    assert len(part.values) == 3
    resumed = occ.tune(objective, psi_of(), steps=6, starts=2, save_to=path)
    assert torch.equal(resumed.values, whole.values)
    assert torch.equal(resumed.path, whole.path)
    assert resumed.parameters == whole.parameters
    with pytest.raises(ValueError, match=r"belongs to another tuning, .* the same options"):
        occ.tune(objective, psi_of(), steps=7, starts=2, save_to=path)


def test_a_full_disk_costs_neither_the_tuning_nor_its_result(tmp_path, monkeypatch):
    *_, objective = stochastic(0, 1000)
    whole = occ.tune(objective, psi_of(), steps=2, starts=1)
    replace = os.replace

    def full_after_one(source, target, calls=[]):  # noqa: B006
        calls.append(target)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        replace(source, target)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_after_one)
    monkeypatch.setattr(TuningBoard, "_write", full_disk)
    options = {"save_to": tmp_path / "tuning", "directory": tmp_path / "log"}
    with pytest.warns(UserWarning, match="No space left on device") as caught:
        found = occ.tune(objective, psi_of(), steps=2, starts=1, **options)
    assert torch.equal(found.values, whole.values)
    messages = [str(warning.message) for warning in caught]
    assert "the tuning goes on without TensorBoard" in messages[0]
    assert ["save_to: the tuning is not saved" in text for text in messages] == [False, True, True]
    monkeypatch.undo()
    resumed = occ.tune(objective, psi_of(), steps=2, starts=1, save_to=tmp_path / "tuning")
    assert torch.equal(resumed.values, whole.values)


def test_tensorboard_gets_the_meta_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    occ.tune(broken_beyond(10.0), psi_of(), steps=20, starts=2, rate=0.4, directory=tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = events.Tags()["scalars"]
    names = ["objective", "best", "terms.1.beta", "gradient_norm", "failures", "at_bounds"]
    for name in [*names, "regret/bowl"]:
        assert f"meta/{name}" in tags
        assert len(events.Scalars(f"meta/{name}")) == 21
    assert sum(event.value for event in events.Scalars("meta/failures")) > 0


def test_tuning_the_forecast_beats_the_papers_constants_where_it_is_played():
    mdp, mean, objective, psi = referred(2000)
    found = occ.tune(objective, psi, steps=25, starts=2, rate=0.4, bounds={"gamma": (0.25, 4.0)})
    assert found.value < -1
    before = float(played_regrets(mdp, psi, mean, 2000, range(8)).mean())
    found.load_into(psi)
    assert float(played_regrets(mdp, psi, mean, 2000, range(8)).mean()) < before / 2


def test_robust_objective_is_between_the_mean_and_the_worst():
    mdp, mean = random_problem()
    switching = occ.SwitchingLosses(torch.stack([mean, 1 - mean]), 100)
    worlds = [World("stochastic", mdp, mean), World("switching", mdp, switching)]

    def value(worlds, **options):
        objective = ForecastObjective(worlds, 300, reference=occ.jin_luo(mdp), trust=1.0, **options)
        return objective(occ.jin_luo(mdp, beta=2.0)).value.item()

    alone = [value([world]) for world in worlds]
    soft, hard = (value(worlds, robustness=r) for r in (0.01, 100.0))
    assert soft == pytest.approx(sum(alone) / 2, abs=0.02)
    assert hard == pytest.approx(max(alone), abs=0.02)


class Family(occ.SeparableRegularizer):
    """A mixture of a power and an entropy: a regularizer that is itself a family."""

    arg_constraints: ClassVar = {
        "power": constraints.interval(0.05, 0.95),
        "mix": constraints.unit_interval,
    }

    def __init__(self, power=0.5, mix=0.3):
        super().__init__(power=power, mix=mix)

    def pair(self, x):
        return -(1 - self.mix) * x**self.power + self.mix * x * x.log()


def test_a_family_of_regularizers_is_tuned():
    *_, objective = stochastic(0, 500)
    tsallis = occ.Tsallis(0.5) / occ.InverseSqrt(0.5) + occ.LogBarrier(1.0)
    for psi in (Family() / occ.InverseSqrt(0.5), tsallis):
        found = occ.tune(objective, psi, steps=6, starts=2, spread=0.3)
        assert found.value < float(found.values[0].min())
        power = next(value for name, value in found.parameters.items() if name.endswith("power"))
        assert 0.05 < power < 0.95
        assert power != 0.5


def test_refine_is_judged_by_playing_and_keeps_to_the_bounds():
    mdp, mean = random_problem(1)
    psi = occ.jin_luo(mdp)
    other = occ.UniformLosses(mean)
    worlds = [World("bernoulli", mdp, mean), World("uniform", mdp, other)]
    objective = ForecastObjective(worlds, 300, reference=psi)
    bounds = {"gamma": (0.5, 2.0), "beta": (0.5, 200.0)}
    tuned = occ.tune(objective, psi, steps=8, starts=1, rate=0.5, bounds=bounds)
    before = [parameter.detach().clone() for parameter in psi.parameters()]
    found = occ.refine(
        objective, psi, tuned, judge="play", runs=2, rounds=2, points=5, radius=3.0, finalists=2
    )
    assert len(found.values) == 1 + 2 * (5 + 1) + 2
    assert not bool(found.excess.any())  # nothing guards
    assert all(map(torch.equal, before, psi.parameters()))
    for name, (low, high) in bounds.items():
        (column,) = (i for i, full in enumerate(tuned.names) if full.endswith(name))
        least, largest = found.points[:, column].aminmax()
        assert low * (1 - 1e-12) <= float(least) < float(largest) <= high * (1 + 1e-12)
    found.tuned.load_into(psi)
    again = torch.nonzero((found.points == found.points[found.chosen]).all(-1)).flatten()
    assert len(again) == 2  # the chosen point was confirmed by other seeds
    for name, losses in (("bernoulli", occ.BernoulliLosses(mean)), ("uniform", other)):
        played = played_regrets(mdp, psi, losses, 300, (1, 2, 3, 4))
        assert found.tuned.regrets[name] == pytest.approx(float(played.mean()))
    assert found.tuned.value == pytest.approx(float(found.values[again].mean()))
    message = (
        "judge: expected 'leap', 'play' or a function of a regularizer and a seed, got 'guess'"
    )
    with pytest.raises(ValueError, match=message):
        occ.refine(objective, psi, tuned, judge="guess")
    with pytest.raises(ValueError, match="hopeless: expected a positive number, got 0"):
        occ.refine(objective, psi, tuned, hopeless=0)


def test_refine_is_not_misled_by_a_lucky_trial():
    *_, objective, psi = referred(100)
    tuned = occ.tune(objective, psi, steps=0, starts=1)
    goal = torch.stack([parameter.detach().log() for parameter in psi.parameters()]) - 0.7
    trials = []

    def bowl(regularizer, _):
        logs = torch.stack([parameter.detach().log() for parameter in regularizer.parameters()])
        trials.append(0.1 * float((logs - goal).square().sum()))
        value = torch.tensor([trials[-1] - 0.3 * (len(trials) == 9)])
        return Evaluation(value, {}, torch.tensor([True]))

    found = occ.refine(objective, psi, tuned, judge=bowl, rounds=2, points=12, radius=2.0)
    assert int(found.values.argmin()) == 8
    assert trials[8] > 0.1
    assert trials[found.chosen] < 0.1
    assert trials[found.chosen] < trials[0]


def test_refine_forecasts_points_only_to_leave_out_the_hopeless(monkeypatch):
    *_, objective, psi = referred(100)
    tuned = occ.tune(objective, psi, steps=0, starts=1)
    centre = math.log(next(iter(tuned.parameters.values())))
    forecasts = []

    def forecast(_, u):
        forecasts.append(float(u[0]))
        return 0.0 if u[0] < centre else 1.0

    monkeypatch.setattr(Search, "forecast", forecast)

    def flat(_regularizer, _seed):
        return Evaluation(torch.zeros(1), {}, torch.tensor([True]))

    def forecasts_and_hopeless_points(hopeless):
        forecasts.clear()
        found = occ.refine(
            objective, psi, tuned, judge=flat, rounds=1, points=12, radius=2.0, hopeless=hopeless
        )
        assert len(found.values) == 1 + 12 + 1
        return len(forecasts), int((found.points[1:13, 0].log() > centre).sum())

    everything = forecasts_and_hopeless_points(math.inf)
    assert everything[0] == 0
    assert everything[1] >= 4
    assert forecasts_and_hopeless_points(2.0)[0] == 12
    screened = forecasts_and_hopeless_points(0.5)
    assert screened[0] > 12
    assert screened[1] == 0


def test_a_guard_plays_where_nothing_can_be_forecast():
    mdp, mean = random_problem(1)
    psi = occ.jin_luo(mdp)
    guard = greedy([mdp], psi, margin=0.05)
    assert guard(psi).excess == 0  # the same seeds, the same runs
    wild = occ.jin_luo(mdp, beta=0.1, gamma=4.0)
    verdict = guard(wild)
    played = played_regrets(mdp, wild, occ.GreedyAdversary(), 100, (1, 2))
    assert verdict.regrets["greedy"] == pytest.approx(float(played.mean()))
    assert verdict.excess == pytest.approx(verdict.regrets["greedy"] / guard.scales[0] - 1)
    assert verdict.excess > 0.5
    assert guard.penalty(torch.tensor([-0.06, 0.05])).tolist() == pytest.approx([0.0, 3.0])
    message = "worlds: 'stochastic' is played, so it takes one MDP and a loss process"
    with pytest.raises(ValueError, match=message):
        Guard([World("stochastic", mdp, mean)], 10, psi)


def test_a_guard_bounds_worlds_of_different_names_one_by_one_and_counts_its_own_noise():
    mdps = [random_problem(seed)[0] for seed in (1, 2, 3)]
    psi, milder = occ.jin_luo(mdps[0]), occ.jin_luo(mdps[0], beta=10.0)
    seeds, adversary = (1, 2, 3), occ.GreedyAdversary()
    mine, theirs = (
        torch.stack([played_regrets(mdp, each, adversary, 100, seeds) for mdp in mdps])
        for each in (milder, psi)
    )
    apart = greedy(mdps, psi, apart=True, seeds=seeds)
    ratios = (mine - theirs) / torch.tensor(apart.scales)[:, None]
    together = greedy(mdps, psi, seeds=seeds)
    assert together(milder).excess == pytest.approx(float(ratios.mean()))
    assert apart(milder).excess == pytest.approx(float(ratios.mean(1).max()))
    upper = ratios.mean(1) + 2 * ratios.std(1) / len(seeds) ** 0.5
    cautious = greedy(mdps, psi, apart=True, seeds=seeds, caution=2.0)
    assert cautious(milder).excess == pytest.approx(float(upper.max()))
    assert cautious(psi).excess == 0
    message = "caution: expected a non-negative number, and two seeds for a standard error"
    with pytest.raises(ValueError, match=message):
        greedy(mdps, psi, seeds=(1,), caution=1.0)


def test_refine_under_a_guard_chooses_what_passes():
    mdp, _, objective, psi = referred(100)
    # ruinous against the adversary
    start = occ.tune(objective, occ.jin_luo(mdp, 0.5, 0.3, 4.0), steps=0, starts=1)
    guard = greedy([mdp], psi)
    found = occ.refine(
        objective, psi, start, rounds=1, particles=8, accuracy=1.0, radius=2.0, guard=guard
    )
    assert float(found.excess[0]) > 0.5
    chosen = found.chosen
    assert float(found.excess[chosen]) < float(found.excess[0]) / 2
    assert found.tuned.regrets["greedy"] == pytest.approx(
        guard.scales[0] * (1 + float(found.excess[chosen]))
    )


def test_the_estimator_of_an_objective_is_what_is_forecast_leapt_and_played():
    mdp, mean = random_problem(1)
    psi, own = occ.jin_luo(mdp, beta=2.0), occ.ReducedVariance(occ.InverseSqrt(0.01))
    *_, objective = stochastic(1, 300, reference=occ.jin_luo(mdp), estimator=own)
    assert objective.scales == referred(300)[2].scales  # the reference is the paper's
    with torch.no_grad():
        forecast = objective(psi).regrets["stochastic"]
        assert float(forecast) == float(occ.forecast(mdp, psi, mean, 300, estimator=own).final)
        assert float(forecast) < float(occ.forecast(mdp, psi, mean, 300).final)
    tuned = occ.tune(objective, psi, steps=0, starts=1)

    def refined(**options):
        found = occ.refine(objective, psi, tuned, rounds=0, **options)
        return found.tuned.regrets["stochastic"]

    sizes = {"particles": 8, "accuracy": 1.0}
    leapt = occ.leap(mdp, psi, mean, 300, estimator=own, **sizes).final
    assert refined(**sizes) == pytest.approx(float(leapt))
    played = played_regrets(mdp, psi, mean, 300, (1, 2), own)
    assert refined(judge="play", runs=2) == pytest.approx(float(played.mean()))


def test_a_guard_plays_with_an_estimator_against_the_papers():
    mdp, _ = random_problem(1)
    psi, own = occ.jin_luo(mdp, beta=2.0), occ.ReducedVariance(occ.InverseSqrt(0.01))
    with_own, plain = (
        float(played_regrets(mdp, psi, occ.GreedyAdversary(), 100, (1, 2), estimator).mean())
        for estimator in (own, None)
    )
    guard = greedy([mdp], psi, estimator=own)
    assert guard.scales == [plain]
    assert guard(psi).regrets["greedy"] == with_own
    assert guard(psi).excess == pytest.approx(with_own / plain - 1)
    assert greedy([mdp], psi, estimator=own, reference_estimator=own).scales == [with_own]


def test_a_point_that_does_not_pass_the_guard_makes_no_other_hopeless(monkeypatch):
    mdp, _, objective, psi = referred(100)
    # ruinous against the adversary
    tuned = occ.tune(objective, occ.jin_luo(mdp, 0.5, 0.3, 4.0), steps=0, starts=1)
    trial = trial_of(objective, particles=8, accuracy=1.0)
    search = Search(objective, psi, tuned, trial, greedy([mdp], psi))
    search.attempt(search.space.coordinates_of(tuned.parameters), 0)
    penalty = float(search.judged[0].value) - search.tried[0]
    assert penalty > 1
    low, high = search.region(search.points[0], 1.0)

    def sobol():
        return torch.quasirandom.SobolEngine(3, scramble=True, seed=1)

    drawn = low + sobol().draw(8, dtype=torch.float64) * (high - low)
    # Worse than what was tried, by forecast.
    for worse, expected in ((0.9, drawn[:2]), (1 + penalty, drawn[-2:])):
        monkeypatch.setattr(search, "forecast", lambda _, worse=worse: search.tried[0] + worse)
        found = list(search.promising(low, high, sobol(), 2, HOPELESS))
        assert torch.equal(torch.stack(found), expected)


def test_the_recipe_tunes_and_then_refines():
    mdp, mean = random_problem(0, (2, 2, 2))
    objective = ForecastObjective([World("stochastic", mdp, mean)], 1000)
    psi = occ.jin_luo(mdp)
    recipe = occ.tuning.Recipe(steps=2, rounds=1, points=3, particles=4)
    bounds = {"alpha": (0.1, 1.0), "beta": (0.5, 200.0), "gamma": (0.25, 4.0)}
    found = occ.tune_and_refine(objective, psi, recipe, bounds=bounds, seed=3)
    tuned = occ.tune(objective, psi, steps=2, starts=1, rate=recipe.rate, bounds=bounds, seed=3)
    assert found.start.parameters == tuned.parameters
    sizes = {"rounds": 1, "points": 3, "particles": 4, "radius": recipe.radius, "seed": 3}
    again = occ.refine(objective, psi, tuned, hopeless=math.inf, **sizes)
    assert found.tuned.parameters == again.tuned.parameters
    assert [x.item() for x in psi.parameters()] == [x.item() for x in occ.jin_luo(mdp).parameters()]


def test_the_recipe_can_do_without_forecasts(monkeypatch):
    mdp, mean = random_problem(0, (2, 2, 2))

    def never(*args, **options):
        raise AssertionError("a forecast")

    monkeypatch.setattr("torch_occ.tuning.objective.forecast", never)
    psi = occ.jin_luo(mdp)
    # Two tables of means for one MDP are two worlds with one name.
    worlds = [World("stochastic", mdp, torch.stack([mean, 1 - mean]))]
    objective = ForecastObjective(worlds, 2000, reference=psi, particles=8)
    assert objective.scales[0].shape == (2,)
    recipe = occ.tuning.Recipe(steps=0, rounds=2, points=4, particles=8)
    found = occ.tune_and_refine(objective, psi, recipe, bounds={"gamma": (0.25, 4.0)})
    assert found.tuned.value < -1  # less than a third of the regret of the paper's constants
    assert found.start.values.shape == (0, 1)
    assert found.start.parameters["terms.1.beta"] == pytest.approx(128.0)


def test_shrinkage_keeps_the_states_alike():
    mdp, mean = random_problem(0, (2, 2, 2))
    worlds = [World("stochastic", mdp, mean)]

    def spread(shrinkage):
        psi = occ.Tsallis() / occ.InverseSqrt(occ.PerState(mdp, 1.0)) + occ.LogBarrier(1.0)
        objective = ForecastObjective(worlds, 500, shrinkage=shrinkage)
        only, bounds = ("gamma", "beta"), {"gamma": (0.2, 5.0)}
        tuned = occ.tune(objective, psi, steps=6, starts=2, rate=0.4, only=only, bounds=bounds)
        tuned.load_into(psi)
        return float(named(psi)["gamma"].detach().log().std())

    free, held = spread(0.0), spread(100.0)
    assert free > 0.05
    assert held < 0.2 * free
    with pytest.raises(ValueError, match="shrinkage: expected a non-negative number, got -1"):
        ForecastObjective(worlds, 500, shrinkage=-1.0)
