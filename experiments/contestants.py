"""The step against other solvers, for experiments/benchmark.py, at the scales of two users.

A network has losses of 1 to 10 and weights of 0.05 to 1; the paper's learner has weights of 192 at
(3,3,3) and losses of 1,000. All contestants do the same in turns: a batch of steps from a cold
start, and the gradients of <direction, q> in the losses and in all parameters that they can
differentiate. What is needed once is not timed: the problem is stated and compiled. Rivals differ
in accuracy, so every gradient is compared with one that is found another way.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import util
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

import torch_occ as occ
from experiments import common
from torch_occ.reference import (
    ACCURATE_CLARABEL,
    ACCURATE_SCS,
    DEFAULT,
    CvxpyLayer,
    Equations,
    Settings,
    atoms,
    flow_constraints,
    largest,
    require,
)

Shape = tuple[int, int, int]  # horizon, width, actions

OURS = ("engine", "torch path", "soft-DP")
NAMES = (*OURS, "cvxpylayers", "accurate SCS", "accurate Clarabel", "Moreau", "POUNCE", "JAX")


#: With these tolerances and scaled inputs Moreau finds q to 1e-12; with its defaults, to 1e-5.
TIGHT_MOREAU = Settings(
    "tight Moreau",
    {"ipm_settings": dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-14)},
    solver="MOREAU",
    normalize=True,
)

ENTROPY, NETWORK, PAPER = "entropy, a network's scales", "jin_luo, a network's", "jin_luo, paper's"


@dataclass(frozen=True)
class Case:
    """A batch of steps on a random MDP, with losses uniform on [0, height]."""

    shape: Shape
    batch: int
    scales: str
    weight: float
    height: float
    seed: int = 0
    clock: Callable[[], float] = time.process_time

    @property
    def t(self) -> float:
        return 1000.0 if self.scales == PAPER else 1.0

    @cached_property
    def mdp(self) -> occ.LayeredMDP:
        return occ.LayeredMDP.random(*self.shape, seed=self.seed)

    @cached_property
    def regularizer(self) -> occ.Regularizer:
        if self.scales == ENTROPY:
            return self.weight * occ.ConditionalEntropy()
        if self.scales == PAPER:
            return occ.jin_luo(self.mdp)
        return occ.jin_luo(self.mdp, beta=self.weight, gamma=1 / self.weight)

    @cached_property
    def losses(self) -> Tensor:
        shape = (self.batch, self.mdp.num_states, self.mdp.num_actions)
        generator = torch.Generator().manual_seed(self.seed)
        return self.height * torch.rand(shape, dtype=torch.float64, generator=generator)

    @cached_property
    def direction(self) -> Tensor:
        """The direction of the gradient: cos 1, cos 2, ..."""
        return torch.arange(1.0, self.losses[0].numel() + 1).double().cos().view_as(self.losses[0])

    @cached_property
    def truth(self) -> Tensor:
        """The gradients of the first two elements, without Newton's method.

        By the soft dynamic program for the entropy, else by dense linear algebra with a Hessian
        from autograd, at the engine's q.
        """
        if known := soft_dynamic_program(self):
            return known(2)[1]
        E, mdp, found = flow_constraints(self.mdp)[0].to_dense(), self.mdp, []
        t, nothing = torch.tensor(self.t, dtype=torch.float64), torch.zeros(len(E), len(E))
        for q in occ.FTRLStep(mdp, self.regularizer)(self.losses[:2], self.t).detach():
            psi = lambda x: self.regularizer(x.view_as(self.direction), t, mdp)  # noqa: E731
            H = torch.autograd.functional.hessian(psi, q.flatten())
            system = torch.cat([torch.cat([H, E.T], 1), torch.cat([E, nothing.double()], 1)])
            right = torch.cat([self.direction.flatten(), nothing[0].double()])
            found.append(-torch.linalg.solve(system, right)[: q.numel()].view_as(q))
        return torch.stack(found)

    def judge(self, q: Tensor, gradient: Tensor) -> tuple[float, float]:
        """The largest residual of q and relative error of its gradient, of two elements."""
        t, pairs = torch.tensor(self.t, dtype=torch.float64), zip(self.losses, q[:2], strict=False)
        of_q = (Equations(self.mdp, self.regularizer, x, t).residual_of_q(y) for x, y in pairs)
        truth = self.truth[: len(gradient)]
        off = (gradient[:2] - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
        return max(of_q), float(off.nan_to_num(torch.inf, torch.inf).max())


#: (scales, weight, height of the losses)
CASES = [(ENTROPY, 1.0, 1.0), (ENTROPY, 1.0, 10.0), (ENTROPY, 0.05, 1.0), (ENTROPY, 0.05, 10.0)]
CASES += [(NETWORK, weight, height) for _, weight, height in CASES] + [(PAPER, 0.0, 1000.0)]

Run = Callable[[int], tuple[Tensor, Tensor]]  # of the first elements: q and its gradient


def differentiated(case: Case, layer: Callable[[Tensor], Tensor], parameters: Iterable[Any]) -> Run:
    """A layer, and autograd: losses `(B, S, A)` -> q."""
    inputs = list(parameters)

    def run(count: int) -> tuple[Tensor, Tensor]:
        loss = case.losses[:count].clone().requires_grad_()
        with warnings.catch_warnings():
            # NumPy warns about cvxpylayers, and diffcp about what the residuals show anyway.
            warnings.simplefilter("ignore")
            q = layer(loss)
            found = torch.autograd.grad((case.direction * q).sum(), [loss, *inputs])
        return q.detach(), found[0]

    return run


def torch_occ(backend: Literal["engine", "torch"], case: Case) -> Run:
    """This package."""
    step = occ.FTRLStep(case.mdp, case.regularizer, backend=backend)
    return differentiated(case, lambda loss: step(loss, case.t), step.parameters())


def layers(settings: Settings, case: Case) -> Run:
    """cvxpylayers under some settings."""
    layer = CvxpyLayer(case.mdp, case.regularizer, settings)
    return differentiated(case, lambda loss: layer(loss, case.t), case.regularizer.parameters())


def soft_dynamic_program(case: Case) -> Run | None:
    """Ten lines of torch, for the entropy only: log-sum-exp backwards, the flow forwards."""
    if case.scales != ENTROPY:
        return None
    mdp, weight = case.mdp, torch.tensor(case.weight, dtype=torch.float64, requires_grad=True)

    def layer(loss: Tensor) -> Tensor:
        later, policies = loss.new_zeros(len(loss), 1), list[Tensor]()
        for here, P in zip(reversed(mdp.layer_slices), reversed(mdp.transitions), strict=True):
            scores = -(loss[:, here] + torch.einsum("san,bn->bsa", P, later)) / weight
            policies.append(scores.softmax(-1))
            later = -weight * scores.logsumexp(-1)
        mass, found = mdp.initial.expand(len(loss), -1), []
        for policy, P in zip(reversed(policies), mdp.transitions, strict=True):
            found.append(mass.unsqueeze(-1) * policy)
            mass = torch.einsum("bsa,san->bn", found[-1], P)
        return torch.cat(found, 1)

    return differentiated(case, layer, [weight])


class Terms(NamedTuple):
    """psi of `jin_luo` over the pairs (S * A), for rivals that need it in their own language."""

    pair: float  # the weight of -sqrt(q(s,a))
    rest: float  # of -sqrt(q(s) - q(s,a))
    barrier: float  # of -log(q(s,a))
    others: Any  # (S * A, S * A): q -> q(s) - q(s,a)
    E: Any  # (S, S * A), E q = b
    b: Any
    start: Any  # (S * A,), the occupancy of the uniform policy

    @staticmethod
    def of(case: Case) -> Terms | None:
        """None if the regularizer is another one."""
        if case.scales == ENTROPY:
            return None
        mdp, given = case.mdp, atoms(case.regularizer, case.t)
        names = (("pair", 0.5), ("rest", 0.5), ("pair", "-log x"))
        pair, rest, barrier = (given[name].item() for name in names)
        ones = torch.ones(mdp.num_actions, mdp.num_actions, dtype=torch.float64).fill_diagonal_(0)
        others = torch.block_diag(*[ones] * mdp.num_states).numpy()
        E, b = flow_constraints(mdp)
        start = occ.occupancy(mdp, occ.uniform_policy(mdp)).flatten().numpy()
        return Terms(pair, rest, barrier, others, E.to_dense().numpy(), b.numpy(), start)


def pounce(case: Case) -> Run | None:
    """POUNCE, Ipopt in Rust, with derivatives in NumPy and its own factors for the gradient."""
    if (terms := Terms.of(case)) is None:
        return None
    package = require("pounce")
    scale = float(largest(atoms(case.regularizer, case.t)))
    problem_object = _Callbacks(terms, scale)
    pairs = len(terms.start)
    shape = {"n": pairs, "m": len(terms.b), "problem_obj": problem_object}
    # The logarithm is the bound of q: without bounds of its own POUNCE is faster and more accurate.
    bounds = {"lb": np.full(pairs, -2e19), "ub": np.full(pairs, 2e19)}
    problem = package.Problem(**shape, **bounds, cl=terms.b, cu=terms.b)
    for name, value in POUNCE.items():
        problem.add_option(name, value)
    direction = case.direction.flatten().numpy()

    def run(count: int) -> tuple[Tensor, Tensor]:
        found = []
        for loss in case.losses[:count]:
            problem_object.loss = loss.flatten().numpy() / scale
            solver = package.Solver(problem)
            with np.errstate(invalid="ignore"):  # a trial outside of q > 0
                q, _ = solver.solve(x0=terms.start)
            bar = np.zeros(solver.kkt_dim)
            bar[:pairs] = direction
            found.append((q, -np.asarray(solver.kkt_solve(bar))[:pairs] / scale))
        q, gradient = (torch.tensor(np.array(x)) for x in zip(*found, strict=True))
        return q.view(count, *loss.shape), gradient.view(count, *loss.shape)

    return run


#: The options with the least error of those that were tried.
POUNCE = {"print_level": 0, "tol": 1e-10}


class _Callbacks:
    """<q, loss> + psi / scale for POUNCE."""

    def __init__(self, terms: Terms, scale: float) -> None:
        self.terms, self.loss = terms, np.zeros(0)
        self.pair, self.rest, self.barrier = (x / scale for x in terms[:3])
        self.rows, self.columns = np.nonzero(terms.E)
        self.entries = terms.E[self.rows, self.columns]
        self.block = np.nonzero(np.tril(terms.others + np.eye(len(terms.others))))

    def objective(self, q: Any) -> float:
        roots = self.pair * np.sqrt(q).sum() + self.rest * np.sqrt(self.terms.others @ q).sum()
        return float(self.loss @ q - roots - self.barrier * np.log(q).sum())

    def gradient(self, q: Any) -> Any:
        rest = self.terms.others @ (self.terms.others @ q) ** -0.5
        return self.loss - 0.5 * (self.pair * q**-0.5 + self.rest * rest) - self.barrier / q

    def constraints(self, q: Any) -> Any:
        return self.terms.E @ q

    def jacobianstructure(self) -> Any:
        return self.rows, self.columns

    def jacobian(self, q: Any) -> Any:
        return self.entries

    def hessianstructure(self) -> Any:
        return self.block

    def hessian(self, q: Any, multipliers: Any, factor: float) -> Any:
        others = self.terms.others
        rest = others * (0.25 * self.rest * (others @ q) ** -1.5) @ others
        rest[np.diag_indices_from(rest)] += 0.25 * self.pair * q**-1.5 + self.barrier / q**2
        return factor * rest[self.block]


def jax(case: Case) -> Run | None:
    """Newton's method in JAX: `lax.while_loop` under `vmap`, and the implicit gradient."""
    if (terms := Terms.of(case)) is None:
        return None
    package, jnp = require("jax"), require("jax.numpy")
    package.config.update("jax_enable_x64", True)
    S, A = case.losses.shape[1:]
    E, others = jnp.asarray(terms.E).reshape(S, S, A), 1.0 - jnp.eye(A)

    def slope(q: Any, w: Any) -> Any:
        rest = (q @ others) ** -0.5 @ others
        return -0.5 * (w[0] * q**-0.5 + w[1] * rest) - w[2] / q

    def solve(q: Any, w: Any, y: Any) -> Any:
        """The u with H u = y - E'v and E u = 0; H has one block (A, A) per state."""
        H = jnp.einsum("ab,sb,bc->sac", others, 0.25 * w[1] * (q @ others) ** -1.5, others)
        H = H + jnp.eye(A) * (0.25 * w[0] * q**-1.5 + w[2] / q**2)[:, None]
        both = jnp.concatenate([y[..., None], E.transpose(1, 2, 0)], -1)  # (S, A, 1 + S)
        both = jnp.linalg.solve(H, both)
        K = jnp.einsum("tsa,sau->tu", E, both[..., 1:])
        v = jnp.linalg.solve(K, jnp.einsum("tsa,sa->t", E, both[..., 0]))
        return both[..., 0] - both[..., 1:] @ v

    def newton(loss: Any, w: Any) -> Any:
        def advance(state: Any) -> Any:
            q, _, k = state
            d = solve(q, w, -loss - slope(q, w))
            size = jnp.abs(d / q).max()
            return q + d / jnp.where(size < 0.25, 1.0, 1.0 + size), size, k + 1

        start = (jnp.asarray(terms.start).reshape(S, A), jnp.inf, 0)
        unfinished = lambda state: (state[1] > 1e-8) & (state[2] < 200)  # noqa: E731
        return package.lax.while_loop(unfinished, advance, start)[0]

    def both(loss: Any, w: Any, bar: Any) -> Any:
        q = newton(loss, w)
        u = solve(q, w, bar)
        (of_weights,) = package.vjp(lambda w: slope(q, w), w)[1](-u)
        return q, -u, of_weights

    batched = package.jit(package.vmap(both, in_axes=(0, None, None)))
    w, direction = jnp.asarray(terms[:3]), jnp.asarray(case.direction.numpy())
    losses = case.losses.numpy()

    def run(count: int) -> tuple[Tensor, Tensor]:
        q, gradient, _ = package.block_until_ready(batched(losses[:count], w, direction))
        return torch.tensor(np.asarray(q)), torch.tensor(np.asarray(gradient))

    return run


class Contestant(NamedTuple):
    """A solver; its package is optional, and it may not know a regularizer."""

    package: str
    prepare: Callable[[Case], Run | None]  # its result is timed


CONTESTANTS = dict(
    zip(
        NAMES,
        (
            Contestant("torch_occ", partial(torch_occ, "engine")),
            Contestant("torch_occ", partial(torch_occ, "torch")),
            Contestant("torch_occ", soft_dynamic_program),
            Contestant("diffcp", partial(layers, DEFAULT)),
            Contestant("diffcp", partial(layers, ACCURATE_SCS)),
            Contestant("diffcp", partial(layers, ACCURATE_CLARABEL)),
            Contestant("moreau", partial(layers, TIGHT_MOREAU)),
            Contestant("pounce", pounce),
            Contestant("jax", jax),
        ),
        strict=True,
    )
)


# -- measuring ------------------------------------------------------------------------------------


class Row(NamedTuple):
    """What one contestant does in one case."""

    contestant: str
    case: Case
    measured: int  # elements of the batch
    seconds: float  # per element, of the quickest run
    of_q: float  # the residual
    of_gradient: float  # the relative error
    note: str = ""


def measure_case(
    case: Case, contestants: dict[str, Contestant], repeats: int, budget: float
) -> list[Row]:
    """All contestants in turns; a batch that would take longer than the budget in part.

    The budget is in seconds, for one run. Who is absent or does not know the regularizer has a note
    and no numbers.
    """
    running, counts, notes = dict[str, Callable[[], Any]](), dict[str, int](), dict[str, str]()
    for name, contestant in contestants.items():
        if not util.find_spec(contestant.package):
            notes[name] = f"{contestant.package} is not installed"
        elif (run := contestant.prepare(case)) is None:
            notes[name] = "another regularizer"
        else:
            run(1)  # compiles
            begun = case.clock()
            run(1)
            counts[name] = int(budget / max(case.clock() - begun, 1e-9))
            counts[name] = max(1, min(case.batch, counts[name]))
            running[name] = partial(run, counts[name])
    seconds = common.in_turns(running, repeats, clock=case.clock)
    rows = []
    for name, count in counts.items():
        rows.append(Row(name, case, count, seconds[name] / count, *case.judge(*running[name]())))
    nothing = float("nan")
    return rows + [
        Row(name, case, 0, nothing, nothing, nothing, why) for name, why in notes.items()
    ]


def cases(sizes: Sequence[Shape], batch: int, clock: Callable[[], float]) -> Iterator[Case]:
    """All scales at all sizes."""
    for shape in sizes:
        for scales, weight, height in CASES:
            yield Case(shape, batch, scales, weight, height, clock=clock)


def measure_rivals(
    names: Sequence[str], given: Iterable[Case], repeats: int, budget: float, path: Path
) -> list[Row]:
    """All cases; the CSV grows with each of them."""
    rows = list[Row]()
    for case in given:
        rows += measure_case(case, {name: CONTESTANTS[name] for name in names}, repeats, budget)
        common.write_csv(path, [_flat(row) for row in rows])
    return rows


def _flat(row: Row) -> dict[str, Any]:
    case = row.case
    about = {"size": case.shape, "scales": case.scales, "weight": case.weight}
    return about | {"height": case.height, **row._asdict(), "case": case.batch}


def rivals_table(rows: list[Row]) -> str:
    """Per scales: the middle time per element, and the least and largest error of gradients."""
    groups = list(dict.fromkeys((row.case.shape, row.case.scales) for row in rows))
    header, body = ["", *(f"{shape}, {scales}" for shape, scales in groups)], []
    for name in dict.fromkeys(row.contestant for row in rows):
        line = [name]
        for group in groups:
            mine = [x for x in rows if (x.case.shape, x.case.scales) == group]
            mine = [row for row in mine if row.contestant == name and row.measured]
            times = sorted(row.seconds for row in mine)
            errors = sorted(row.of_gradient for row in mine)
            span = " to ".join(dict.fromkeys(f"{x:.0e}" for x in errors[:1] + errors[-1:]))
            middle = common.seconds(times[len(times) // 2]) if times else ""
            line.append(f"{middle}, {span}" if mine else "-")
        body.append(line)
    return common.table(header, body)
