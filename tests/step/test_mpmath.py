"""The step and all its gradients against the same equations solved with 60 digits."""

import pytest
import torch
from many_digits import DIGITS, Oracle
from mpmath import mp, mpf
from torch import Tensor
from zoo import masked, random_loss, tensor

import torch_occ as occ

pytestmark = pytest.mark.usefixtures("both_backends")


def build(kind: str, theta: dict[str, float]) -> occ.Regularizer:
    exactly = {name: tensor(value) for name, value in theta.items()}
    eta = occ.InverseSqrt(exactly["gamma"])
    if kind == "hybrid":
        return occ.HybridTsallis(exactly["alpha"]) / eta + occ.LogBarrier(exactly["beta"])
    return (
        occ.Shannon() / eta if kind == "shannon" else occ.HybridComplement(exactly["alpha"]) / eta
    )


small = occ.LayeredMDP.random(horizon=3, width=2, num_actions=2, seed=5)
wide = occ.LayeredMDP.random(horizon=3, width=3, num_actions=3, seed=5, concentration=0.1)
CASES = {  # (kind, mdp, scale of the loss, t, parameters, the smallest q must lie below)
    "paper": ("hybrid", small, 1e3, 1e3, {"alpha": 0.6, "beta": 192.0, "gamma": 1.0}, 1),
    "masked": ("hybrid", masked().mdp, 1e6, 1e6, {"alpha": 0.6, "beta": 0.3, "gamma": 0.9}, 1e-4),
    "late": ("hybrid", small, 1e8, 1e6, {"alpha": 0.6, "beta": 1e-3, "gamma": 0.7}, 1e-9),
    "wide": ("hybrid", wide, 1e7, 1e6, {"alpha": 0.6, "beta": 1e-3, "gamma": 0.9}, 1e-7),
    "nearly_tsallis": (
        "hybrid",
        small,
        1e8,
        1e6,
        {"alpha": 1e-9, "beta": 1e-9, "gamma": 0.7},
        1e-9,
    ),
    "shannon": ("shannon", small, 2.0, 5.0, {"gamma": 1.2}, 1),
    "shannon_rare": ("shannon", small, 40.0, 1.0, {"gamma": 1.2}, 1e-10),
    "complement": ("complement", masked().mdp, 2.0, 5.0, {"alpha": 0.9, "gamma": 0.7}, 1),
    "complement_rare": ("complement", small, 1e8, 1e6, {"alpha": 0.9, "gamma": 0.7}, 1e-9),
}


@pytest.fixture(autouse=True)
def many_digits():
    with mp.workdps(DIGITS):
        yield


def numbers(values: list[mpf]) -> Tensor:
    return tensor([float(x) for x in values])


@pytest.mark.parametrize("case", CASES)
def test_sixty_digits(case):
    kind, mdp, scale, t, theta, rare = CASES[case]
    step = occ.FTRLStep(mdp, build(kind, theta))
    loss, episode = random_loss(mdp, scale).requires_grad_(), tensor(t).requires_grad_()
    transitions, initial = (
        [p.clone().requires_grad_() for p in mdp.transitions],
        mdp.initial.clone().requires_grad_(),
    )
    solution = step.solve(loss, episode, mdp=mdp.with_transitions(transitions, initial))

    oracle = Oracle(mdp, loss.detach(), {**theta, "t": t}, kind)
    q, v = oracle.solve(solution.q.detach())
    assert min(q) < rare
    torch.testing.assert_close(solution.q[mdp.actions], numbers(q), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        solution.value, numbers(v), rtol=0, atol=1e-12 * float(max(map(abs, v)))
    )

    names = [name.rsplit(".")[-1] for name, _ in step.named_parameters()]
    inputs = {
        "loss": loss,
        "t": episode,
        **dict(zip(names, step.parameters(), strict=True)),
        "initial": initial,
    }
    inputs |= {f"P{k}": p for k, p in enumerate(transitions[:-1])}
    random = torch.Generator().manual_seed(0)
    direction = torch.randn(loss.shape, dtype=torch.float64, generator=random) * mdp.actions
    v_bar = torch.randn(solution.value.shape, dtype=torch.float64, generator=random)
    nothing = torch.zeros_like(v_bar)
    # A plain cotangent, one that weighs rare pairs as much as common ones, one of the multipliers.
    relative = direction / torch.where(mdp.actions, solution.q.detach(), 1.0)
    for q_bar, m_bar in [
        (direction, nothing),
        (relative, nothing),
        (torch.zeros_like(direction), v_bar),
    ]:
        scalar = (q_bar * solution.q).sum() + (m_bar * solution.value).sum()
        found = dict(
            zip(
                inputs,
                torch.autograd.grad(scalar, list(inputs.values()), retain_graph=True),
                strict=True,
            )
        )
        truth = oracle.pull_back(q, v, q_bar, m_bar)
        P = torch.zeros(*mdp.actions.shape, mdp.num_states, dtype=torch.float64)
        P[mdp.actions] = torch.stack([numbers(row) for row in truth.pop("P")])
        for k, (here, there) in enumerate(
            zip(mdp.layer_slices, mdp.layer_slices[1:], strict=False)
        ):
            close(f"P{k}", found[f"P{k}"] * mdp.actions[here].unsqueeze(-1), P[here, :, there])
        close("loss", found["loss"][mdp.actions], numbers(truth.pop("loss")))
        close("initial", found["initial"], numbers(truth.pop("initial")[: len(initial)]))
        for name, value in truth.items():
            close(name, found[name], tensor(float(value)))


def close(name: str, found: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(
        found, truth, rtol=1e-10, atol=0, msg=lambda text: f"gradient in {name}: {text}"
    )
