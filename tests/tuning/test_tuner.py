"""The tuner: it finds what is known, resumes to the bit, and says what went wrong."""

import math
import os

import pytest
import torch
from zoo import random_problem

import torch_occ as occ
from torch_occ.tuning import Evaluation, ForecastObjective, World
from torch_occ.tuning.tune import TuningBoard


def stochastic(seed, episodes, **options):
    """An MDP with its means, and the forecast regret there."""
    mdp, mean = random_problem(seed)
    return mdp, mean, ForecastObjective([World("stochastic", mdp, mean)], episodes, **options)


def referred(episodes):
    """The same with the paper's constants, which are also the reference."""
    psi = occ.jin_luo(random_problem(1)[0])
    return *stochastic(1, episodes, reference=psi), psi


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


def test_bounds_are_kept_and_reported():
    found = occ.tune(bowl, psi_of(), steps=60, starts=2, rate=0.4, bounds={"beta": (5.0, 100.0)})
    assert found.parameters["terms.1.beta"] == pytest.approx(5.0)
    assert found.at_bounds == ("terms.1.beta",)
    assert "(at its bound)" in str(found)


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
    monkeypatch.setattr(TuningBoard, "on_checkpoint", full_disk)
    options = {"save_to": tmp_path / "tuning", "directory": tmp_path / "log"}
    with pytest.warns(UserWarning, match="No space left on device") as caught:
        found = occ.tune(objective, psi_of(), steps=2, starts=1, **options)
    assert torch.equal(found.values, whole.values)
    messages = [str(warning.message) for warning in caught]
    assert "goes on without this callback" in messages[0]
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


def test_the_estimator_of_an_objective_is_what_is_forecast():
    mdp, mean = random_problem(1)
    psi, own = occ.jin_luo(mdp, beta=2.0), occ.ReducedVariance(occ.InverseSqrt(0.01))
    *_, objective = stochastic(1, 300, reference=occ.jin_luo(mdp), estimator=own)
    assert objective.scales == referred(300)[2].scales  # the reference is the paper's
    with torch.no_grad():
        forecast = objective(psi).regrets["stochastic"]
        assert float(forecast) == float(occ.forecast(mdp, psi, mean, 300, estimator=own).final)
        assert float(forecast) < float(occ.forecast(mdp, psi, mean, 300).final)


def test_noise_beyond_what_is_trusted_costs_its_square():
    mdp, mean, _ = stochastic(1, 300)
    psi = occ.jin_luo(mdp, beta=0.5)
    values = [stochastic(1, 300, trust=x)[2](psi).value.item() for x in (0.0, 1.0)]
    share = occ.forecast(mdp, psi, mean, 300).noise_share.item()
    assert values[0] - values[1] == pytest.approx(30 * share**2)
    assert share > 0.01
