"""torch_occ against cvxpy and cvxpylayers, and the judge against both."""

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import util

import pytest
import torch
from torch import Tensor
from zoo import random_loss

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import flow_adjoint, flow_residual
from torch_occ.reference import (
    ACCURATE_CLARABEL,
    ACCURATE_SCS,
    DEFAULT,
    MOREAU,
    Answer,
    Comparison,
    CvxpyLayer,
    Equations,
    Settings,
    ask,
    atoms,
    compare,
    flow_constraints,
    judge,
    solve_cvxpy,
    spread,
)
from torch_occ.regularizers.base import Regularizer, StatewiseRegularizer
from torch_occ.regularizers.catalog import (
    ConditionalEntropy,
    HybridComplement,
    HybridTsallis,
    LogBarrier,
    Shannon,
    TabularRegularizer,
    Term,
    Tsallis,
    XLogX,
    jin_luo,
)
from torch_occ.regularizers.schedules import Constant, InverseSqrt
from torch_occ.step.ftrl import FTRLStep


def narrow() -> LayeredMDP:
    """Two start states, masks, single actions, a layer with one pair, zero probabilities."""
    actions = torch.tensor(
        [[1, 1, 1], [0, 1, 1], [0, 1, 0], [0, 0, 1], [1, 0, 1]], dtype=torch.bool
    )
    first = torch.tensor([[[1.0], [1.0], [1.0]]] * 2, dtype=torch.float64)
    second = torch.tensor([[[0.0, 0.0], [0.4, 0.6], [0.0, 0.0]]], dtype=torch.float64)
    initial = torch.tensor([0.3, 0.7], dtype=torch.float64)
    return LayeredMDP(
        [first, second, torch.ones(2, 3, 1, dtype=torch.float64)], actions=actions, initial=initial
    )


def masked() -> LayeredMDP:
    """Two start states, and states with one, two and three actions in every layer."""
    actions = torch.tensor(
        [[1, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 1], [1, 1, 1]], dtype=torch.bool
    )
    first = torch.rand(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first[0, 0, 1] = 0.0
    initial = torch.tensor([0.25, 0.75], dtype=torch.float64)
    return LayeredMDP(
        [first / first.sum(-1, keepdim=True), torch.ones(3, 3, 1, dtype=torch.float64)],
        actions=actions,
        initial=initial,
    )


MDPS: dict[str, Callable[[], LayeredMDP]] = {
    "full": lambda: LayeredMDP.random(3, 3, 3, seed=0),
    "masked": masked,
    "narrow": narrow,
}

REGULARIZERS: dict[str, Callable[[LayeredMDP], Regularizer]] = {
    "Tsallis": lambda mdp: Tsallis(),
    "Tsallis 3/4": lambda mdp: Tsallis(0.75) / Constant(0.5),
    "HybridTsallis": lambda mdp: HybridTsallis(0.5),
    "HybridTsallis, alpha 0": lambda mdp: HybridTsallis(0.0),
    "HybridComplement": lambda mdp: HybridComplement(),
    "Shannon": lambda mdp: Shannon() / InverseSqrt(),
    "ConditionalEntropy": lambda mdp: ConditionalEntropy() / InverseSqrt(2.0),
    "LogBarrier": lambda mdp: LogBarrier(0.5),
    "jin_luo": lambda mdp: jin_luo(mdp, beta=2.0),
    "entropies and barrier": lambda mdp: (
        Shannon() / InverseSqrt() + 0.3 * ConditionalEntropy() + LogBarrier(0.1)
    ),
}


def equations_of(mdp: LayeredMDP, regularizer: Regularizer, loss: Tensor, t: float) -> Equations:
    return Equations(
        mdp, regularizer, loss, torch.tensor(t, dtype=torch.float64, requires_grad=True)
    )


@pytest.fixture(scope="module")
def paper() -> tuple[LayeredMDP, Regularizer, Tensor, float]:
    """The paper's parameters, where cvxpylayers is known to fail as it comes."""
    mdp = LayeredMDP.random(3, 3, 3, seed=0)
    return mdp, jin_luo(mdp), random_loss(mdp, 1000.0), 1000.0


@pytest.fixture(scope="module")
def comparison(paper: tuple[LayeredMDP, Regularizer, Tensor, float]) -> Comparison:
    return compare(*paper, settings=[DEFAULT, ACCURATE_SCS, ACCURATE_CLARABEL])


# -- the statement -----------------------------------------------------------------------------


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("mdp", MDPS)
def test_q_and_the_multipliers_agree_with_cvxpy(mdp: str, regularizer: str) -> None:
    model = MDPS[mdp]()
    psi, loss, t = REGULARIZERS[regularizer](model), random_loss(model, 3.0), 7.0
    ours = FTRLStep(model, psi).solve(loss, t)
    q, value = solve_cvxpy(model, psi, loss, t)
    torch.testing.assert_close(ours.q, q, rtol=1e-5, atol=1e-6)
    # The multipliers are as good as the slope of psi at q, which the cone solver knows less well
    # than q.
    torch.testing.assert_close(ours.value, value, rtol=1e-4, atol=1e-4)
    assert equations_of(model, psi, loss, t).residual_of_q(ours.q) < 1e-13


@pytest.mark.parametrize("mdp", MDPS)
def test_the_constraints_read_off_the_transitions_are_those_of_occupancy(mdp: str) -> None:
    model = MDPS[mdp]()
    E, b = flow_constraints(model)
    x, v = random_loss(model)[model.actions], random_loss(model)[:, 0]
    torch.testing.assert_close(E @ x - b, flow_residual(model, spread(model, x)))
    torch.testing.assert_close(E.T @ v, flow_adjoint(model, v)[model.actions])


def test_atoms_are_merged_and_empty_ones_dropped() -> None:
    mdp = LayeredMDP.random(2, 2, 4)
    weights = {
        atom: weight.item()
        for atom, weight in atoms(jin_luo(mdp, beta=3.0, gamma=0.5) + LogBarrier(1.0), 4.0).items()
    }
    assert weights == pytest.approx(
        {("pair", 0.5): 4.0, ("rest", 0.5): 2.0, ("pair", "-log x"): 4.0}
    )
    assert list(atoms(ConditionalEntropy(), 1.0)) == [("pair given state", "x log x")]


def test_what_cvxpy_cannot_state_is_refused() -> None:
    class Statewise(StatewiseRegularizer):
        def per_state(self, q_s: Tensor) -> Tensor:
            return (q_s**2).sum(-1)

    class Concave(TabularRegularizer):
        def table(self) -> tuple[Term, ...]:
            return (Term("state", XLogX(), -1.0),)

    mdp = LayeredMDP.random(2, 2, 2)
    with pytest.raises(TypeError, match="Statewise has no table of terms"):
        solve_cvxpy(mdp, Statewise(), random_loss(mdp))
    with pytest.raises(ValueError, match="not convex"):
        solve_cvxpy(mdp, Concave(), random_loss(mdp))
    for loss in (random_loss(mdp)[:-1], torch.nan * random_loss(mdp)):
        with pytest.raises(
            ValueError, match=r"loss: expected finite values of shape \(\*batch, 3, 2\)"
        ):
            solve_cvxpy(mdp, Shannon(), loss)
    batch = LayeredMDP([torch.stack([p, p]) for p in mdp.transitions])
    with pytest.raises(ValueError, match="single MDP"):
        solve_cvxpy(batch, Shannon(), random_loss(mdp))


@pytest.mark.parametrize(
    ("module", "use"), [("cvxpy", solve_cvxpy), ("cvxpylayers.torch", CvxpyLayer)]
)
def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, module: str, use: Callable[..., object]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    mdp = LayeredMDP.random(2, 2, 2)
    arguments = (random_loss(mdp),) if use is solve_cvxpy else ()
    with pytest.raises(
        ImportError, match=rf"needs {module.split('.')[0]}: pip install torch-occ\[reference\]"
    ):
        use(mdp, Shannon(), *arguments)


# -- the layer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_gradients_agree_with_accurate_cvxpylayers(regularizer: str) -> None:
    mdp = masked()
    found = compare(
        mdp,
        REGULARIZERS[regularizer](mdp),
        random_loss(mdp, 3.0),
        7.0,
        [ACCURATE_CLARABEL],
        tolerance=1e-4,
    )
    assert not found.wrong, str(found)
    assert max(found.answers[0].errors.values()) < 1e-9, str(found)


def test_a_batch_equals_its_elements() -> None:
    mdp = masked()
    layer = CvxpyLayer(mdp, jin_luo(mdp, beta=1.0))
    t = torch.tensor([3.0, 1e6], dtype=torch.float64)
    loss = torch.stack([random_loss(mdp, 3.0, seed=0), random_loss(mdp, 1e3, seed=1)])
    solo = torch.stack([layer(one, when) for one, when in zip(loss, t, strict=True)])
    torch.testing.assert_close(layer(loss, t), solo, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(
        FTRLStep(mdp, layer.regularizer)(loss, t), solo, rtol=1e-5, atol=1e-7
    )


def test_no_gradient_is_asked_for_when_nothing_needs_one() -> None:
    mdp = LayeredMDP.random(2, 2, 2)
    for settings in (ACCURATE_SCS, ACCURATE_CLARABEL):
        assert not CvxpyLayer(mdp, Shannon(), settings)(random_loss(mdp)).requires_grad


def test_an_exponent_gets_no_gradient_from_cvxpylayers() -> None:
    mdp = LayeredMDP.random(2, 2, 2)
    found = compare(mdp, Tsallis(0.75), random_loss(mdp), settings=[ACCURATE_CLARABEL])
    ours, theirs = found.answers
    assert ours.errors["power"] < 1e-9
    assert theirs.gradients["power"] is None
    assert "power" not in theirs.errors
    assert "none" in str(found)


# -- the judge ---------------------------------------------------------------------------------


def test_default_settings_are_found_wrong_and_accurate_ones_right(comparison: Comparison) -> None:
    assert list(comparison.wrong) == ["cvxpylayers, default"], str(comparison)
    assert {"loss", "alpha", "beta", "gamma", "t"} <= set(comparison.wrong["cvxpylayers, default"])
    ours, default, *accurate = comparison.answers
    assert max(ours.errors.values()) < 1e-9
    assert default.errors["alpha"] > 1  # not a matter of digits
    for answer in accurate:
        assert max(answer.errors.values()) < 1e-4
        torch.testing.assert_close(answer.q, ours.q, rtol=1e-6, atol=0)
        torch.testing.assert_close(
            answer.gradients["loss"], ours.gradients["loss"], rtol=1e-4, atol=1e-10
        )


def test_the_table_names_everybody_and_the_culprit(comparison: Comparison) -> None:
    text = str(comparison)
    assert all(answer.name in text for answer in comparison.answers)
    assert "cvxpylayers, default is wrong in loss, alpha, gamma, beta, t." in text
    right = tuple(answer for answer in comparison.answers if answer.name not in comparison.wrong)
    assert "All satisfy the equations to 0.001." in str(replace(comparison, answers=right))


def corrupt(answer: Answer, what: str) -> Answer:
    if what == "q":
        return replace(
            answer,
            q=answer.q
            * (1 + 0.01 * torch.arange(1.0, answer.q.numel() + 1).view(answer.q.shape).sin()),
        )
    gradient = answer.gradients[what]
    assert gradient is not None
    return replace(answer, gradients={**answer.gradients, what: 1.01 * gradient})


@pytest.mark.parametrize("what", ["q", "loss", "alpha", "beta", "gamma", "t"])
def test_a_corrupted_torch_occ_is_named(
    paper: tuple[LayeredMDP, Regularizer, Tensor, float], comparison: Comparison, what: str
) -> None:
    ours, _, *accurate = comparison.answers
    c = torch.arange(1, 22, dtype=torch.float64).cos().view(7, 3)
    assert judge(equations_of(*paper), c, [corrupt(ours, what), *accurate]).wrong == {
        "torch_occ": [what]
    }
    assert judge(
        equations_of(*paper), c, [corrupt(ours, what), corrupt(accurate[0], what)]
    ).wrong.keys() >= {"torch_occ"}


def test_not_a_number_is_no_excuse(
    paper: tuple[LayeredMDP, Regularizer, Tensor, float], comparison: Comparison
) -> None:
    ours, _, accurate, _ = comparison.answers
    broken = replace(
        ours, q=torch.nan * ours.q, gradients={**ours.gradients, "loss": torch.nan * ours.q}
    )
    found = judge(
        equations_of(*paper),
        torch.arange(1, 22, dtype=torch.float64).cos().view(7, 3),
        [broken, accurate],
    )
    assert found.wrong == {"torch_occ": ["q", "loss"]}


def test_a_single_policy_leaves_nothing_to_differentiate() -> None:
    mdp = LayeredMDP.random(3, 2, 1)
    equations = equations_of(mdp, LogBarrier(), random_loss(mdp), 1.0)
    found = judge(
        equations,
        equations.loss,
        [ask("torch_occ", FTRLStep(mdp, equations.regularizer), equations, equations.loss)],
    )
    assert found.answers[0].errors["loss"] < 1e-3
    assert str(found).endswith("torch_occ satisfies the equations to 0.001.")


def test_negative_occupancies_and_zero_gradients_have_plain_residuals(
    paper: tuple[LayeredMDP, Regularizer, Tensor, float],
) -> None:
    equations = equations_of(*paper)
    answer = ask(
        "torch_occ", FTRLStep(equations.mdp, equations.regularizer), equations, equations.loss
    )
    assert equations.residual_of_q(-answer.q) == torch.inf
    assert equations.residual_of_gradient(
        answer.q, equations.loss, torch.zeros_like(answer.q)
    ) == pytest.approx(1.0)


def test_late_in_a_run_accuracy_takes_normalization_too() -> None:
    mdp = LayeredMDP.random(3, 3, 3, seed=0)
    settings = [
        replace(ACCURATE_CLARABEL, name="as written", normalize=False),
        ACCURATE_SCS,
        ACCURATE_CLARABEL,
    ]
    found = compare(mdp, jin_luo(mdp), random_loss(mdp, 1e6), 1e6, settings)
    assert list(found.wrong) == ["cvxpylayers, as written"], str(found)


def test_settings_that_are_not_installed_are_named() -> None:
    mdp = LayeredMDP.random(2, 2, 2)
    absent = Settings("absent", solver="NO_SUCH_SOLVER")
    found = compare(mdp, Shannon(), random_loss(mdp), settings=[absent, ACCURATE_CLARABEL])
    assert [answer.name for answer in found.answers] == [
        "torch_occ",
        "cvxpylayers, accurate Clarabel",
    ]
    why = "no_such_solver is not installed: pip install torch-occ[benchmark]"
    assert found.left_out == {"cvxpylayers, absent": why}
    *_, said, verdict = str(found).splitlines()
    assert said == f"cvxpylayers, absent was not compared: {why}"
    assert verdict == "torch_occ, cvxpylayers, accurate Clarabel satisfy the equations to 0.001."


def test_a_comparison_with_nobody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mdp, find = LayeredMDP.random(2, 2, 2), util.find_spec
    with pytest.raises(ValueError, match="settings: expected at least one"):
        compare(mdp, Shannon(), random_loss(mdp), settings=[])
    monkeypatch.setattr(
        util, "find_spec", lambda name: None if name == "cvxpylayers" else find(name)
    )
    with pytest.raises(
        ImportError,
        match=r"default: cvxpylayers is not installed: pip install torch-occ\[reference\]",
    ):
        compare(mdp, Shannon(), random_loss(mdp), settings=[DEFAULT, ACCURATE_SCS])


def test_a_judge_without_answers_is_refused(
    paper: tuple[LayeredMDP, Regularizer, Tensor, float],
) -> None:
    with pytest.raises(ValueError, match="answers: expected at least one"):
        judge(equations_of(*paper), paper[2], [])


@pytest.mark.skipif(not MOREAU.installed, reason="the Moreau solver is not installed")
def test_moreau_is_found_wrong(paper: tuple[LayeredMDP, Regularizer, Tensor, float]) -> None:
    assert list(compare(*paper, settings=[MOREAU]).wrong) == ["cvxpylayers, Moreau"]
