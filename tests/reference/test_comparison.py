"""torch_occ against cvxpy and cvxpylayers, and the judge against both."""

import sys
from dataclasses import replace
from importlib import util

import pytest
import torch
from theory_cases import masked
from zoo import PROBLEMS, random_loss

import torch_occ as occ
from torch_occ import reference
from torch_occ.mdp.occupancy import flow_adjoint, flow_residual
from torch_occ.reference import ACCURATE_CLARABEL, ACCURATE_SCS, DEFAULT, MOREAU, compare
from torch_occ.regularizers import catalog

MDPS = {
    "full": occ.LayeredMDP.random(3, 3, 3, seed=0),
    "masked": masked(),
    "narrow": PROBLEMS["masked"]().mdp,
}

ENTROPIES = occ.Shannon() / occ.InverseSqrt() + 0.3 * occ.ConditionalEntropy()
REGULARIZERS = {
    "Tsallis": occ.Tsallis(),
    "Tsallis 3/4": occ.Tsallis(0.75) / occ.Constant(0.5),
    "HybridTsallis": occ.HybridTsallis(0.5),
    "HybridTsallis, alpha 0": occ.HybridTsallis(0.0),
    "HybridComplement": catalog.HybridComplement(),
    "Shannon": occ.Shannon() / occ.InverseSqrt(),
    "ConditionalEntropy": occ.ConditionalEntropy() / occ.InverseSqrt(2.0),
    "LogBarrier": occ.LogBarrier(0.5),
    "jin_luo": occ.jin_luo(MDPS["full"], beta=2.0),
    "entropies and barrier": ENTROPIES + occ.LogBarrier(0.1),
}


def equations_of(mdp, regularizer, loss, t):
    t = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    return reference.Equations(mdp, regularizer, loss, t)


@pytest.fixture(scope="module")
def paper():
    """The paper's parameters, where cvxpylayers is known to fail as it comes."""
    mdp = occ.LayeredMDP.random(3, 3, 3, seed=0)
    return mdp, occ.jin_luo(mdp), random_loss(mdp, 1000.0), 1000.0


@pytest.fixture(scope="module")
def comparison(paper):
    return compare(*paper, settings=[DEFAULT, ACCURATE_SCS, ACCURATE_CLARABEL])


# -- the statement -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mdp", "regularizer"),
    [
        *(("masked", name) for name in REGULARIZERS),
        *(("full", name) for name in ("Tsallis 3/4", "jin_luo", "entropies and barrier")),
        *(("narrow", name) for name in ("HybridTsallis", "HybridComplement", "Shannon")),
    ],
)
def test_q_and_the_multipliers_agree_with_cvxpy(mdp, regularizer):
    model = MDPS[mdp]
    psi, loss, t = REGULARIZERS[regularizer], random_loss(model, 3.0), 7.0
    ours = occ.FTRLStep(model, psi).solve(loss, t)
    q, value = reference.solve_cvxpy(model, psi, loss, t)
    torch.testing.assert_close(ours.q, q, rtol=1e-5, atol=1e-6)
    # The multipliers are as good as the slope of psi at q, which the cone solver knows less well
    # than q.
    torch.testing.assert_close(ours.value, value, rtol=1e-4, atol=1e-4)
    assert equations_of(model, psi, loss, t).residual_of_q(ours.q) < 1e-13


@pytest.mark.parametrize("mdp", MDPS)
def test_the_constraints_read_off_the_transitions_are_those_of_occupancy(mdp):
    model = MDPS[mdp]
    E, b = reference.flow_constraints(model)
    x, v = random_loss(model)[model.actions], random_loss(model)[:, 0]
    torch.testing.assert_close(E @ x - b, flow_residual(model, reference.spread(model, x)))
    torch.testing.assert_close(E.T @ v, flow_adjoint(model, v)[model.actions])


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    mdp, message = occ.LayeredMDP.random(2, 2, 2), r"pip install 'torch-occ\[reference\]'"
    monkeypatch.setitem(sys.modules, "cvxpylayers.torch", None)
    with pytest.raises(ImportError, match=f"needs cvxpylayers: {message}"):
        reference.CvxpyLayer(mdp, occ.Shannon())
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(ImportError, match=f"needs cvxpy: {message}"):
        reference.solve_cvxpy(mdp, occ.Shannon(), random_loss(mdp))


# -- the layer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_gradients_agree_with_accurate_cvxpylayers(regularizer):
    mdp, psi = masked(), REGULARIZERS[regularizer]
    loss = random_loss(mdp, 3.0)
    found = compare(mdp, psi, loss, 7.0, [ACCURATE_CLARABEL], tolerance=1e-4)
    assert not found.wrong, str(found)
    assert max(found.answers[0].errors.values()) < 1e-9, str(found)


def test_a_batch_equals_its_elements():
    mdp = masked()
    layer = reference.CvxpyLayer(mdp, occ.jin_luo(mdp, beta=1.0))
    t = torch.tensor([3.0, 1e6], dtype=torch.float64)
    loss = torch.stack([random_loss(mdp, 3.0, seed=0), random_loss(mdp, 1e3, seed=1)])
    solo = torch.stack([layer(one, when) for one, when in zip(loss, t, strict=True)])
    torch.testing.assert_close(layer(loss, t), solo, rtol=1e-6, atol=1e-8)
    ours = occ.FTRLStep(mdp, layer.regularizer)(loss, t)
    torch.testing.assert_close(ours, solo, rtol=1e-5, atol=1e-7)


def test_an_exponent_gets_no_gradient_from_cvxpylayers():
    mdp = occ.LayeredMDP.random(2, 2, 2)
    found = compare(mdp, occ.Tsallis(0.75), random_loss(mdp), settings=[ACCURATE_CLARABEL])
    ours, theirs = found.answers
    assert ours.errors["power"] < 1e-9
    assert theirs.gradients["power"] is None
    assert "power" not in theirs.errors
    assert "none" in str(found)


# -- the judge ---------------------------------------------------------------------------------


def test_default_settings_are_found_wrong_and_accurate_ones_right(comparison):
    assert list(comparison.wrong) == ["cvxpylayers, default"], str(comparison)
    assert {"loss", "alpha", "beta", "gamma", "t"} <= set(comparison.wrong["cvxpylayers, default"])
    ours, default, *accurate = comparison.answers
    assert max(ours.errors.values()) < 1e-9
    assert default.errors["alpha"] > 1  # not a matter of digits
    for answer in accurate:
        assert max(answer.errors.values()) < 1e-4
        torch.testing.assert_close(answer.q, ours.q, rtol=1e-6, atol=0)
        theirs, mine = answer.gradients["loss"], ours.gradients["loss"]
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-10)


C = torch.arange(1, 22, dtype=torch.float64).cos().view(7, 3)


def corrupt(answer, what):
    if what == "q":
        wave = torch.arange(1.0, answer.q.numel() + 1).view(answer.q.shape).sin()
        return replace(answer, q=answer.q * (1 + 0.01 * wave))
    return replace(answer, gradients={**answer.gradients, what: 1.01 * answer.gradients[what]})


@pytest.mark.parametrize("what", ["q", "loss", "alpha", "beta", "gamma", "t"])
def test_a_corrupted_torch_occ_is_named(paper, comparison, what):
    ours, _, *accurate = comparison.answers
    one = reference.judge(equations_of(*paper), C, [corrupt(ours, what), *accurate])
    assert one.wrong == {"torch_occ": [what]}
    wrong = [corrupt(ours, what), corrupt(accurate[0], what)]
    assert "torch_occ" in reference.judge(equations_of(*paper), C, wrong).wrong


def test_not_a_number_is_no_excuse(paper, comparison):
    ours, _, accurate, _ = comparison.answers
    nan = torch.nan * ours.q
    broken = replace(ours, q=nan, gradients={**ours.gradients, "loss": nan})
    found = reference.judge(equations_of(*paper), C, [broken, accurate])
    assert found.wrong == {"torch_occ": ["q", "loss"]}


def test_negative_occupancies_and_zero_gradients_have_plain_residuals(paper):
    equations = equations_of(*paper)
    step = occ.FTRLStep(equations.mdp, equations.regularizer)
    q = reference.ask("torch_occ", step, equations, equations.loss).q
    assert equations.residual_of_q(-q) == torch.inf
    found = equations.residual_of_gradient(q, equations.loss, torch.zeros_like(q))
    assert found == pytest.approx(1.0)


def test_late_in_a_run_accuracy_takes_normalization_too():
    mdp = occ.LayeredMDP.random(3, 3, 3, seed=0)
    as_written = replace(ACCURATE_CLARABEL, name="as written", normalize=False)
    settings = [as_written, ACCURATE_SCS, ACCURATE_CLARABEL]
    found = compare(mdp, occ.jin_luo(mdp), random_loss(mdp, 1e6), 1e6, settings)
    assert list(found.wrong) == ["cvxpylayers, as written"], str(found)


def test_settings_that_are_not_installed_are_named():
    mdp = occ.LayeredMDP.random(2, 2, 2)
    absent = reference.Settings("absent", solver="NO_SUCH_SOLVER")
    found = compare(mdp, occ.Shannon(), random_loss(mdp), settings=[absent, ACCURATE_CLARABEL])
    names = [answer.name for answer in found.answers]
    assert names == ["torch_occ", "cvxpylayers, accurate Clarabel"]
    why = "no_such_solver is not installed: pip install 'torch-occ[benchmark]'"
    assert found.left_out == {"cvxpylayers, absent": why}
    *_, said, verdict = str(found).splitlines()
    assert said == f"cvxpylayers, absent was not compared: {why}"
    assert verdict == "torch_occ, cvxpylayers, accurate Clarabel satisfy the equations to 0.001."


def test_a_comparison_with_nobody_is_refused(monkeypatch):
    mdp, find = occ.LayeredMDP.random(2, 2, 2), util.find_spec
    none = {"cvxpylayers"}
    monkeypatch.setattr(util, "find_spec", lambda name: None if name in none else find(name))
    message = r"default: cvxpylayers is not installed: pip install 'torch-occ\[reference\]'"
    with pytest.raises(ImportError, match=message):
        compare(mdp, occ.Shannon(), random_loss(mdp), settings=[DEFAULT, ACCURATE_SCS])


@pytest.mark.skipif(bool(MOREAU.missing), reason="the Moreau solver is not installed")
def test_moreau_is_found_wrong(paper):
    assert list(compare(*paper, settings=[MOREAU]).wrong) == ["cvxpylayers, Moreau"]
