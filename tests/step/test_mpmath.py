"""The step and all its gradients against the same equations solved with 40 digits."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import mpmath
import pytest
import torch
from mpmath import mp, mpf
from torch import Tensor
from zoo import masked, random_loss, tensor

import torch_occ as occ

pytestmark = pytest.mark.usefixtures("both_backends")

DIGITS = 40


@dataclass(frozen=True)
class Term:
    """c * alpha^i beta^j ... * sum over x of f(x), with x = offset + row . q; f by its first two derivatives."""

    slope: Callable[[mpf], mpf]
    bend: Callable[[mpf], mpf]
    coefficient: int
    exponents: dict[str, mpf]
    rows: list[tuple[int, dict[int, int]]]  # (offset, {pair: factor})

    def weight(self, theta: dict[str, mpf]) -> mpf:
        return mp.fprod([self.coefficient, *(theta[name] ** power for name, power in self.exponents.items())])


class Oracle:
    """F(q, v) = (grad psi + loss - E'v, E q - b) = 0 by Newton's method over Python lists."""

    def __init__(self, mdp: occ.LayeredMDP, loss: Tensor, theta: dict[str, float], terms: str) -> None:
        self.pairs = [tuple(pair) for pair in mdp.actions.nonzero().tolist()]
        self.num_states, self.theta = mdp.num_states, {name: mpf(value) for name, value in theta.items()}
        self.terms = {"hybrid": self.hybrid, "shannon": self.shannon, "complement": self.complement}[terms]()
        self.loss = [mpf(float(loss[pair])) for pair in self.pairs]
        P = mdp.joint_transitions
        self.P = [[mpf(float(p)) for p in P[pair]] for pair in self.pairs]  # [pair][next state]
        self.source = [mpf(float(p)) for p in mdp.initial] + [mpf(0)] * (mdp.num_states - len(mdp.initial))

    def hybrid(self) -> list[Term]:
        others = [[j for j, (other, b) in enumerate(self.pairs) if other == s and b != a] for s, a in self.pairs]
        rest = [(0, dict.fromkeys(row, 1)) for row in others if row]
        barrier = Term(lambda x: -1 / x, lambda x: x**-2, 1, {"beta": 1}, self.each())
        return [self.root(-1, {}, self.each()), self.root(-1, {"alpha": 1}, rest), barrier]

    def shannon(self) -> list[Term]:
        return [Term(lambda x: mp.log(x) + 1, lambda x: 1 / x, 1, {"gamma": -1, "t": mpf(0.5)}, self.each())]

    def complement(self) -> list[Term]:
        return [self.root(-1, {}, self.each()), self.root(-1, {"alpha": 1}, [(1, {i: -1}) for i in range(len(self.pairs))])]

    def each(self) -> list[tuple[int, dict[int, int]]]:
        return [(0, {i: 1}) for i in range(len(self.pairs))]

    def root(self, coefficient: int, exponents: dict[str, int], rows: list[tuple[int, dict[int, int]]]) -> Term:
        slope, bend = lambda x: 1 / (2 * mp.sqrt(x)), lambda x: -1 / (4 * x * mp.sqrt(x))
        return Term(slope, bend, coefficient, {**exponents, "gamma": -1, "t": mpf(0.5)}, rows)

    def gradient(self, term: Term, q: list[mpf]) -> list[mpf]:
        """Of the term without its weight."""
        total = [mpf(0)] * len(q)
        for offset, row in term.rows:
            slope = term.slope(offset + sum(factor * q[i] for i, factor in row.items()))
            for i, factor in row.items():
                total[i] += factor * slope
        return total

    def residual(self, q: list[mpf], v: list[mpf]) -> mpmath.matrix:
        parts = [[term.weight(self.theta) * g for g in self.gradient(term, q)] for term in self.terms]
        ahead = [sum(p * x for p, x in zip(row, v, strict=True)) for row in self.P]
        dual = [sum(g) + c - v[s] + x for *g, c, (s, _), x in zip(*parts, self.loss, self.pairs, ahead, strict=True)]
        arrived = [sum(self.P[i][s] * q[i] for i in range(len(q))) for s in range(self.num_states)]
        gone = [sum(x for x, (state, _) in zip(q, self.pairs, strict=True) if state == s) for s in range(self.num_states)]
        return mp.matrix([*dual, *(g - a - b for g, a, b in zip(gone, arrived, self.source, strict=True))])

    def jacobian(self, q: list[mpf]) -> mpmath.matrix:
        n = len(q)
        K = mp.zeros(n + self.num_states)
        for term in self.terms:
            for offset, row in term.rows:
                bend = term.weight(self.theta) * term.bend(offset + sum(factor * q[i] for i, factor in row.items()))
                for (i, x), (j, y) in product(row.items(), row.items()):
                    K[i, j] += bend * x * y
        for (i, (state, _)), s in product(enumerate(self.pairs), range(self.num_states)):
            K[n + s, i] = int(state == s) - self.P[i][s]
            K[i, n + s] = -K[n + s, i]
        return K

    def solve(self, start: Tensor) -> tuple[list[mpf], list[mpf]]:
        n = len(self.pairs)
        q, v = [mpf(float(start[pair])) for pair in self.pairs], [mpf(0)] * self.num_states
        for _ in range(10):
            change = mp.lu_solve(self.jacobian(q), -self.residual(q, v))
            q, v = [x + dx for x, dx in zip(q, change[:n], strict=True)], [x + dx for x, dx in zip(v, change[n:], strict=True)]
            if max(abs(dx / x) for x, dx in zip(q, change[:n], strict=True)) < mpf(10) ** (5 - DIGITS):
                return q, v
        raise AssertionError("the oracle did not converge")

    def pull_back(self, q: list[mpf], v: list[mpf], q_bar: Tensor, v_bar: Tensor) -> dict[str, object]:
        """The gradient of <q_bar, q> + <v_bar, v> in everything: K' m = z_bar, then - m . dF."""
        n = len(q)
        bars = [*(float(q_bar[pair]) for pair in self.pairs), *(float(x) for x in v_bar)]
        m = mp.lu_solve(self.jacobian(q).T, mp.matrix([mpf(x) for x in bars]))
        found: dict[str, object] = {"loss": [-x for x in m[:n]], "initial": m[n : n + len(self.source)]}
        found["P"] = [[m[n + s] * q[i] - m[i] * v[s] for s in range(self.num_states)] for i in range(n)]
        for name, value in self.theta.items():
            found[name] = mpf(0)
            for term in self.terms:
                rate = term.exponents.get(name, 0) * term.weight(self.theta) / value
                found[name] -= rate * sum(x * g for x, g in zip(m[:n], self.gradient(term, q), strict=True))
        return found


def build(kind: str, theta: dict[str, float]) -> occ.Regularizer:
    exactly = {name: tensor(value) for name, value in theta.items()}
    eta = occ.InverseSqrt(exactly["gamma"])
    if kind == "hybrid":
        return occ.HybridTsallis(exactly["alpha"]) / eta + occ.LogBarrier(exactly["beta"])
    return occ.Shannon() / eta if kind == "shannon" else occ.HybridComplement(exactly["alpha"]) / eta


small = occ.LayeredMDP.random(horizon=3, width=2, num_actions=2, seed=5)
wide = occ.LayeredMDP.random(horizon=3, width=3, num_actions=3, seed=5, concentration=0.1)
CASES = {  # (kind, mdp, scale of the loss, t, parameters, the smallest q must lie below)
    "paper": ("hybrid", small, 1e3, 1e3, {"alpha": 0.6, "beta": 192.0, "gamma": 1.0}, 1),
    "masked": ("hybrid", masked().mdp, 1e6, 1e6, {"alpha": 0.6, "beta": 0.3, "gamma": 0.9}, 1e-4),
    "late": ("hybrid", small, 1e8, 1e6, {"alpha": 0.6, "beta": 1e-3, "gamma": 0.7}, 1e-9),
    "wide": ("hybrid", wide, 1e7, 1e6, {"alpha": 0.6, "beta": 1e-3, "gamma": 0.9}, 1e-7),
    "nearly_tsallis": ("hybrid", small, 1e8, 1e6, {"alpha": 1e-9, "beta": 1e-9, "gamma": 0.7}, 1e-9),
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
def test_forty_digits(case):
    kind, mdp, scale, t, theta, rare = CASES[case]
    step = occ.FTRLStep(mdp, build(kind, theta))
    loss, episode = random_loss(mdp, scale).requires_grad_(), tensor(t).requires_grad_()
    transitions, initial = [p.clone().requires_grad_() for p in mdp.transitions], mdp.initial.clone().requires_grad_()
    solution = step.solve(loss, episode, mdp=mdp.with_transitions(transitions, initial))

    oracle = Oracle(mdp, loss.detach(), {**theta, "t": t}, kind)
    q, v = oracle.solve(solution.q.detach())
    assert min(q) < rare
    torch.testing.assert_close(solution.q[mdp.actions], numbers(q), rtol=1e-12, atol=0)
    torch.testing.assert_close(solution.value, numbers(v), rtol=0, atol=1e-12 * float(max(map(abs, v))))

    names = [name.rsplit(".")[-1] for name, _ in step.named_parameters()]
    inputs = {"loss": loss, "t": episode, **dict(zip(names, step.parameters(), strict=True)), "initial": initial}
    inputs |= {f"P{k}": p for k, p in enumerate(transitions[:-1])}
    random = torch.Generator().manual_seed(0)
    direction = torch.randn(loss.shape, dtype=torch.float64, generator=random) * mdp.actions
    v_bar = torch.randn(solution.value.shape, dtype=torch.float64, generator=random)
    nothing = torch.zeros_like(v_bar)
    # An ordinary cotangent, one that weighs rare pairs as much as common ones, and one of the multipliers.
    relative = direction / torch.where(mdp.actions, solution.q.detach(), 1.0)
    for q_bar, m_bar in [(direction, nothing), (relative, nothing), (torch.zeros_like(direction), v_bar)]:
        scalar = (q_bar * solution.q).sum() + (m_bar * solution.value).sum()
        found = dict(zip(inputs, torch.autograd.grad(scalar, list(inputs.values()), retain_graph=True), strict=True))
        truth = oracle.pull_back(q, v, q_bar, m_bar)
        P = torch.zeros(*mdp.actions.shape, mdp.num_states, dtype=torch.float64)
        P[mdp.actions] = torch.stack([numbers(row) for row in truth.pop("P")])
        for k, (here, there) in enumerate(zip(mdp.layer_slices, mdp.layer_slices[1:], strict=False)):
            close(f"P{k}", found[f"P{k}"] * mdp.actions[here].unsqueeze(-1), P[here, :, there])
        close("loss", found["loss"][mdp.actions], numbers(truth.pop("loss")))
        close("initial", found["initial"], numbers(truth.pop("initial")[: len(initial)]))
        for name, value in truth.items():
            close(name, found[name], tensor(float(value)))


def close(name: str, found: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=0, msg=lambda text: f"gradient in {name}: {text}")
