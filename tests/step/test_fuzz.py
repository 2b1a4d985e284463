"""Fuzzing: every solution is certified, here again with 60 digits, or its status says why not."""

from dataclasses import dataclass

import pytest
import torch
from entropies import solve_exactly, worst_error
from hypothesis import event, given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf
from torch import Tensor

import torch_occ as occ
from torch_occ import Status

pytestmark = pytest.mark.usefixtures("both_backends")


@dataclass(frozen=True)
class Draw:
    """A problem small enough to print, from which everything else follows."""

    sizes: tuple[int, ...]
    num_actions: int
    concentration: float
    zeros: float  # share of transitions, and of losses, that are exactly zero
    masked: float  # share of pairs that do not exist
    loss: float
    t: float
    alpha: float
    beta: float
    gamma: float
    seed: int

    def model(self) -> occ.LayeredMDP:
        random = torch.Generator().manual_seed(self.seed)
        sizes, A = self.sizes, self.num_actions
        kernels = []
        for here, there in zip(sizes, (*sizes[1:], 1), strict=True):
            logits = (
                torch.rand(here, A, there, dtype=torch.float64, generator=random).log()
                / self.concentration
            )
            keep = torch.rand(here, A, there, generator=random) >= self.zeros
            keep.scatter_(-1, torch.randint(there, (here, A, 1), generator=random), True)
            kernels.append(logits.masked_fill(~keep, -torch.inf).softmax(-1))
        actions = torch.rand(sum(sizes), A, generator=random) >= self.masked
        actions.scatter_(-1, torch.randint(A, (sum(sizes), 1), generator=random), True)
        initial = torch.rand(sizes[0], dtype=torch.float64, generator=random) + 0.01
        return occ.LayeredMDP(kernels, actions=actions, initial=initial / initial.sum()).prune()

    def losses(self, mdp: occ.LayeredMDP) -> Tensor:
        """Like sums of importance-weighted losses: some zero, some huge, a few negative."""
        random = torch.Generator().manual_seed(self.seed + 1)
        shape = (mdp.num_states, mdp.num_actions)
        size = self.loss ** torch.rand(shape, dtype=torch.float64, generator=random)
        sign = 1 - 2 * (torch.rand(shape, dtype=torch.float64, generator=random) < 0.1).double()
        return sign * size * (torch.rand(shape, generator=random) >= self.zeros)


# -- a certificate of our own ----------------------------------------------------------------------

ROOT = (lambda x: 1 / (2 * mp.sqrt(x)), lambda x: -1 / (4 * x * mp.sqrt(x)))
LOG = (lambda x: 1 / x, lambda x: -1 / x**2)
ENTROPY = (lambda x: mp.log(x) + 1, lambda x: 1 / x)
CUBE_ROOT = (lambda x: x ** (mpf(1) / 3 - 1) / 3, lambda x: -2 * x ** (mpf(1) / 3 - 2) / 9)


@dataclass(frozen=True)
class Family:
    """A regularizer, and its terms (argument, weight, (f', f'')) written down a second time."""

    build: object  # Draw -> Regularizer
    terms: object  # (Draw, 1/eta) -> terms
    excuses: tuple[Status, ...] = ()  # what a solve may end with besides success
    entropy: object = None  # 1/eta -> (w, kappa) of torch_occ.entropic, whose q may fall to zero


FAMILIES = {
    "hybrid": Family(
        lambda d: occ.HybridTsallis(d.alpha) / occ.InverseSqrt(d.gamma) + occ.LogBarrier(d.beta),
        lambda d, w: [
            ("pair", -w, ROOT),
            ("rest", -w * mpf(d.alpha), ROOT),
            ("pair", -mpf(d.beta), LOG),
        ],
    ),
    "tsallis": Family(
        lambda d: occ.Tsallis(torch.tensor(1 / 3, dtype=torch.float64)) / occ.InverseSqrt(d.gamma),
        lambda d, w: [("pair", -w, CUBE_ROOT)],
    ),
    "log_barrier": Family(
        lambda d: occ.LogBarrier(d.beta + d.gamma),
        lambda d, w: [("pair", -mpf(d.beta + d.gamma), LOG)],
    ),
    "shannon": Family(
        lambda d: occ.Shannon() / occ.InverseSqrt(d.gamma),
        lambda d, w: [("pair", w, ENTROPY)],
        entropy=lambda w: (w, w),
    ),
    "conditional_entropy": Family(
        lambda d: occ.ConditionalEntropy() / occ.InverseSqrt(d.gamma),
        lambda d, w: [("pair", w, ENTROPY), ("state", -w, ENTROPY)],
        entropy=lambda w: (w, 0),
    ),
    # 1 - q can be as small as the rarest transition. Then the slope of its root is so large that
    # the rest of the layer is lost to rounding.
    "complement": Family(
        lambda d: occ.HybridComplement(d.alpha) / occ.InverseSqrt(d.gamma) + occ.LogBarrier(d.beta),
        lambda d, w: [
            ("pair", -w, ROOT),
            ("complement", -w * mpf(d.alpha), ROOT),
            ("pair", -mpf(d.beta), LOG),
        ],
        (Status.STALLED,),
    ),
}


def certificate(mdp: occ.LayeredMDP, loss: Tensor, q: Tensor, terms: list) -> tuple[mpf, mpf]:
    """The largest errors of the flow, relative to q(s), and of stationarity.

    The unit of stationarity is q times its curvature. Sums of losses along an episode are known
    only up to rounding; that part of the residual is subtracted.
    """
    rounding = (
        8
        * mpf(torch.finfo(loss.dtype).eps)
        * mdp.horizon
        * mpf(float(loss[mdp.actions].abs().max()))
    )
    pairs = [
        [(s, a) for a in range(mdp.num_actions) if mdp.actions[s, a]] for s in range(mdp.num_states)
    ]
    x = {pair: mpf(float(q[pair])) for state in pairs for pair in state}
    u = [mp.fsum(x[pair] for pair in state) for state in pairs]
    layers = [range(here.start, here.stop) for here in mdp.layer_slices]
    slope, curvature = dict.fromkeys(x, mpf(0)), dict.fromkeys(x, mpf(0))
    for argument, weight, (first, second) in terms:
        for layer in layers:
            for s in layer:
                for pair in pairs[s]:
                    others = [other for other in pairs[s] if other != pair]
                    if argument == "pair":
                        slope[pair] += weight * first(x[pair])
                        curvature[pair] += weight * second(x[pair])
                    elif argument == "state":
                        slope[pair] += weight * first(u[s])
                    elif argument == "rest" and others:
                        rest = mp.fsum(x[other] for other in others)
                        curvature[pair] += weight * second(rest)
                        for other in others:
                            slope[other] += weight * first(rest)
                    elif argument == "complement" and (
                        elsewhere := [*others, *(p for r in layer if r != s for p in pairs[r])]
                    ):
                        complement = mp.fsum(x[other] for other in elsewhere)
                        slope[pair] -= weight * first(complement)
                        curvature[pair] += weight * second(complement)
    inflow = [mpf(float(p)) for p in mdp.initial] + [mpf(0)] * (mdp.num_states - len(mdp.initial))
    value, dual = [mpf(0)] * mdp.num_states, mpf(0)
    for layer, following, kernel in reversed(
        list(zip(layers, [*layers[1:], []], mdp.transitions, strict=True))
    ):
        for s in layer:
            row = {
                (s, a): [
                    (r, mpf(float(kernel[s - layer[0], a, r - following[0]]))) for r in following
                ]
                for _, a in pairs[s]
            }
            for pair, ahead in row.items():
                for r, p in ahead:
                    inflow[r] += p * x[pair]
            Q = {
                pair: mpf(float(loss[pair]))
                + slope[pair]
                + mp.fsum(p * value[r] for r, p in row[pair])
                for pair in row
            }
            unit = {pair: x[pair] * curvature[pair] for pair in row}
            # The multiplier that suits all actions of the state best.
            value[s] = mp.fsum(Q[pair] / unit[pair] ** 2 for pair in row) / mp.fsum(
                unit[pair] ** -2 for pair in row
            )
            dual = max(dual, *((abs(Q[pair] - value[s]) - rounding) / unit[pair] for pair in row))
    return max(abs(have - come) / have for have, come in zip(u, inflow, strict=True)), dual


# -- the fuzz --------------------------------------------------------------------------------------


def powers_of_ten(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda x: float(10**x))


draws = st.builds(
    Draw,
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    num_actions=st.integers(1, 4),
    concentration=st.sampled_from([1.0, 10.0, 0.1, 0.01]),
    zeros=st.sampled_from([0.0, 0.3, 0.7]),
    masked=st.sampled_from([0.0, 0.3, 0.7]),
    loss=powers_of_ten(0, 12),
    t=powers_of_ten(0, 8),
    alpha=st.sampled_from([1.0, 0.0, 1e-9, 0.1, 3.0]),
    beta=st.sampled_from([1.0, 0.0, 1e-9, 256.0]),
    gamma=powers_of_ten(-3, 3),
    seed=st.integers(0, 10**6),
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60)
@given(draw=draws)
def test_certified_or_honest(family, draw):
    mdp = draw.model()
    loss = draw.losses(mdp).requires_grad_()
    this = FAMILIES[family]
    solution = occ.FTRLStep(mdp, this.build(draw)).solve(loss, draw.t, check=False)
    status, q = Status(int(solution.status)), solution.q.detach()
    event(f"{family}: {status.name}")
    # 1 / q^2 is infinite for states that are reached with a probability below 1e-154.
    out_of_range = (
        status == Status.NOT_FINITE and float(occ.interior_point(mdp)[mdp.actions].min()) < 1e-150
    )
    assert status == Status.CONVERGED or status in this.excuses or out_of_range
    slopes = torch.autograd.grad(solution.q.sum() + solution.value.sum(), loss)[0][mdp.actions]
    if status == Status.CONVERGED:
        assert (q[~mdp.actions] == 0).all()
        assert slopes.isfinite().all()
        with mp.workdps(60):
            weight = mp.sqrt(mpf(draw.t)) / mpf(draw.gamma)
            if this.entropy is not None:
                exact = solve_exactly(mdp, loss.detach(), *this.entropy(weight))
                assert worst_error(q, exact) < 1e-10
                return
            assert (q[mdp.actions] > 0).all()
            flow, dual = certificate(mdp, loss.detach(), q, this.terms(draw, weight))
        assert flow < 1e-14
        assert dual < 1e-9
    else:
        assert slopes.isnan().all()
