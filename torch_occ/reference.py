"""The FTRL step in cvxpy and as a layer of cvxpylayers, and a judge of answers by residuals.

The constraints E q = b are built from the transitions, and psi from the tables of its terms. No
code of Newton's method is used. The packages (`pip install 'torch-occ[reference]'`) are imported
when they are used. It runs on the CPU, in double precision.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module, util
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from torch_occ._support.choices import extra
from torch_occ._support.files import markdown
from torch_occ.mdp.checks import check_that
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import flow_source
from torch_occ.regularizers.base import Composition, Regularizer
from torch_occ.regularizers.parameters import fit
from torch_occ.regularizers.terms import Log, Power
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.solution import Budgets

# -- the problem, from the tables alone --------------------------------------------------------

#: A convex function of an argument. An exponent p stands for x^p (-x^p for 0 < p < 1); the other
#: functions have names.
Atom = tuple[str, float | str]

#: q(s,a) log( q(s,a) / q(s) ): two terms of which only the sum is convex.
CONDITIONAL: Atom = ("pair given state", "x log x")


def atoms(regularizer: Regularizer, t: Tensor | float) -> dict[Atom, Tensor]:
    """psi_t as a combination of convex atoms with positive weights.

    Products such as alpha / eta_t are computed in torch, because cvxpy's rules for parameters
    (DPP) forbid them. Autograd then passes the derivative in a weight on to alpha, gamma and t.
    """
    for name, place in regularizer.places().items():
        raise ValueError(
            f"regularizer: {name} has one value per {place.kind}, and the statement in cvxpy has "
            "one weight per term; give a scalar"
        )
    weights: dict[Atom, Tensor] = {}
    nothing = torch.zeros((), dtype=torch.float64)
    composition = Composition(regularizer)
    for part, _ in composition.others:
        raise TypeError(
            f"{type(part).__name__} has no table of terms, so it cannot be stated in cvxpy; "
            "use a TabularRegularizer"
        )
    found = composition.weigh(composition.values(torch.as_tensor(t, dtype=torch.float64)))
    for term, given, p in zip(composition.terms, found.terms, found.exponents, strict=True):
        weight = nothing + fit(given, 0)
        function: float | str = "x log x"
        if term.function is Log:
            function, weight = "-log x", -weight
        if term.function is Power:
            function = float(torch.as_tensor(p).detach())
            weight = -weight if 0 < function < 1 else weight
        atom = term.argument, function
        weights[atom] = weights.get(atom, nothing) + weight
    state, pair = ("state", "x log x"), ("pair", "x log x")
    if bool((weights.get(state, nothing) < 0).any()):
        weights[CONDITIONAL] = -weights.pop(state)
        weights[pair] = weights.get(pair, nothing) - weights[CONDITIONAL]
    for (argument, function), weight in weights.items():
        if bool((weight < 0).any()):
            raise ValueError(
                f"the term {function} of {argument} is not convex with this sign, so psi cannot be "
                "stated in cvxpy"
            )
    return {atom: weight for atom, weight in weights.items() if bool((weight != 0).any())}


def on_pairs(mdp: LayeredMDP, loss: Tensor) -> Tensor:
    """The loss on the N existing pairs, `(*batch, N)`."""
    expected = f"finite values of shape (*batch, {mdp.num_states}, {mdp.num_actions})"
    fine = loss.shape[-2:] == mdp.actions.shape and loss[..., mdp.actions].isfinite().all()
    check_that(bool(fine), "loss", expected, loss)
    return loss[..., mdp.actions]


def spread(mdp: LayeredMDP, x: Tensor) -> Tensor:
    """The inverse of `on_pairs`: `(*batch, N)` -> `(*batch, S, A)`, zero on masked pairs."""
    place = (mdp.actions.flatten().cumsum(0) - 1).clamp(min=0).view(mdp.actions.shape)
    return torch.where(mdp.actions, x[..., place], 0.0)


def flow_constraints(mdp: LayeredMDP) -> tuple[Tensor, Tensor]:
    """The sparse matrix E `(S, N)` over the existing pairs, and b `(S,)`."""
    batch = tuple(mdp.batch_shape)
    check_that(not batch, "mdp", "a single MDP", f"a batch of shape {batch}")
    state = mdp.actions.nonzero()[:, 0]
    number = mdp.actions.flatten().cumsum(0) - 1  # the index of each pair among the existing ones
    rows, columns = [state], [torch.arange(len(state))]
    values = [torch.ones(len(state), dtype=mdp.dtype)]
    slices = pairwise(mdp.layer_slices)
    for (here, there), p in zip(slices, mdp.to_sparse().transitions, strict=False):
        rows.append(there.start + p.indices()[1])
        columns.append(number[here.start * mdp.num_actions + p.indices()[0]])
        values.append(-p.detach().values())
    index, shape = torch.stack([torch.cat(rows), torch.cat(columns)]), (mdp.num_states, len(state))
    E = torch.sparse_coo_tensor(index, torch.cat(values), shape, check_invariants=False).coalesce()
    return E, flow_source(mdp).detach()


def state_in_cvxpy(
    mdp: LayeredMDP, which: Sequence[Atom], *, exact_powers: bool = False
) -> tuple[Any, Any, list[Any]]:
    """The step as a DPP problem.

    Powers other than 1/2 become second-order cones, with a nearby fraction as the exponent. With
    `exact_powers` they become power cones, which diffcp does not support. Returns the problem, its
    variable q over the N existing pairs, and its parameters: the loss, and one weight per atom.
    """
    cp, scipy = require("cvxpy"), require("scipy.sparse")
    E, b = flow_constraints(mdp)
    state = mdp.actions.nonzero()[:, 0]
    flows = scipy.csr_array((E.values().numpy(), tuple(E.indices().numpy())), shape=tuple(E.shape))
    ones = state.double().fill_(1.0).numpy()
    sums = scipy.csr_array((ones, (state.numpy(), range(len(state)))), shape=tuple(E.shape))
    siblings = sums.T @ sums  # pairs that share a state
    others = (siblings - scipy.eye_array(len(state))).tocsr()
    several = (mdp.actions.sum(-1)[state] > 1).numpy()  # not the only action of a state
    beside = (mdp.layer[state].bincount()[mdp.layer[state]] > 1).numpy()  # not the only of a layer
    q, loss = cp.Variable(len(state)), cp.Parameter(len(state))
    weights = [cp.Parameter(nonneg=True) for _ in which]
    arguments = {"pair": q, "rest": others[several] @ q, "state": sums @ q}
    arguments["complement"] = 1 - q[beside]

    def value(atom: Atom) -> Any:
        if atom == CONDITIONAL:
            return cp.sum(cp.rel_entr(q, siblings @ q))
        x, p = arguments[atom[0]], atom[1]
        if isinstance(p, float):
            power = cp.sqrt(x) if p == 0.5 else cp.power(x, p, approx=not exact_powers)
            return cp.sum(-power if 0 < p < 1 else power)
        return cp.sum(-cp.entr(x) if p == "x log x" else -cp.log(x))

    terms = [weight * value(atom) for weight, atom in zip(weights, which, strict=True)]
    problem = cp.Problem(cp.Minimize(loss @ q + sum(terms)), [flows @ q == b.numpy()])
    return problem, q, [loss, *weights]


def clarabel(tolerance: float) -> dict[str, float]:
    """The options of Clarabel for one tolerance."""
    return dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), tolerance)


def solve_cvxpy(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    loss: Tensor,
    t: Tensor | float = 1.0,
    *,
    constraints: Budgets | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Solve the step with cvxpy: q `(S, A)` and the multipliers v `(S,)`.

    Args:
        constraints: budgets without a batch.
        options: of `Problem.solve`, in place of Clarabel with tight tolerances.
    """
    weights = atoms(regularizer, t)
    problem, q, parameters = state_in_cvxpy(mdp, list(weights), exact_powers=True)
    if constraints is not None:
        spent = on_pairs(mdp, constraints.costs).detach().numpy() @ q
        limits = constraints.limits.detach().numpy()
        problem = type(problem)(problem.objective, [*problem.constraints, spent <= limits])
    scale = largest(weights)
    for parameter, given in zip(parameters, [on_pairs(mdp, loss), *weights.values()], strict=True):
        parameter.value = (given.detach() / scale).numpy()
    with warnings.catch_warnings():
        # If Clarabel cannot certify the digits asked for, it returns its best point, and cvxpy
        # warns.
        warnings.filterwarnings("ignore", "Solution may be inaccurate", UserWarning)
        # Shorter steps end at 1e-12 on every processor, those of its default at up to 1e-7.
        shorter = {"solver": "CLARABEL", "max_step_fraction": 0.9}
        problem.solve(**(shorter | clarabel(1e-14) | options))
    # cvxpy adds y'(E q - b) to the objective, so v = -y.
    y = torch.as_tensor(problem.constraints[0].dual_value)
    return spread(mdp, torch.as_tensor(q.value)), -scale * y


def largest(weights: Mapping[Atom, Tensor]) -> Tensor:
    """The largest weight, `()` or `(B,)`; solvers are far more accurate after a division by it."""
    return torch.stack(torch.broadcast_tensors(*weights.values())).detach().amax(0)


# -- as a layer --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Options with which cvxpylayers solves and differentiates."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)  # the layer's `solver_args`
    mode: str | None = None  # diffcp's method for derivatives; None is its default
    solver: str | None = None  # the backend; None is diffcp
    normalize: bool = False  # divide loss and weights by the largest weight first

    @property
    def missing(self) -> str:
        """Which package is missing and how to install it; empty if none is."""
        which, solvers = "reference", ["diffcp", self.arguments.get("solve_method", "scs").lower()]
        if self.solver is not None:
            which, solvers = "benchmark", [self.solver.lower()]
        names = ("cvxpy", "cvxpylayers", *solvers)
        absent = [name for name in names if util.find_spec(name) is None]
        return f"{absent[0]} is not installed: pip install 'torch-occ[{which}]'" if absent else ""


DEFAULT = Settings("default")
LSMR = Settings("lsmr", mode="lsmr")
MOREAU = Settings("Moreau", solver="MOREAU")
_SCS, _CLARABEL = {"eps": 1e-10, "max_iters": 200_000}, {"solve_method": "Clarabel"}
ACCURATE_SCS = Settings("accurate SCS", _SCS, "dense", normalize=True)
ACCURATE_CLARABEL = Settings(
    "accurate Clarabel", _CLARABEL | clarabel(1e-12), "dense", normalize=True
)
ALL_SETTINGS = (DEFAULT, LSMR, MOREAU, ACCURATE_SCS, ACCURATE_CLARABEL)


class CvxpyLayer(nn.Module):
    """The step by cvxpylayers: `layer(loss, t)` -> q.

    It is differentiable in the loss, in t and in the regularizer's parameters, apart from exponents
    and from parameters of terms whose weight is zero at construction.
    """

    def __init__(
        self, mdp: LayeredMDP, regularizer: Regularizer, settings: Settings = ACCURATE_CLARABEL
    ) -> None:
        super().__init__()
        self.mdp, self.regularizer, self.settings = mdp, regularizer, settings
        self.atoms = list(atoms(regularizer, 1.0))
        problem, q, parameters = state_in_cvxpy(mdp, self.atoms)
        layer = require("cvxpylayers.torch").CvxpyLayer
        self.layer = layer(
            problem, parameters, [q], solver=settings.solver, solver_args=dict(settings.arguments)
        )

    def forward(self, loss: Tensor, t: Tensor | float = 1.0) -> Tensor:
        """loss `(S, A)` or `(B, S, A)`; t and the parameters are scalars or `(B,)`."""
        weights = atoms(self.regularizer, t)
        scale = largest(weights) if self.settings.normalize else torch.ones(())
        inputs = [on_pairs(self.mdp, loss) / scale.unsqueeze(-1)]
        inputs += [weights[atom] / scale for atom in self.atoms]
        # Without a gradient to compute, diffcp would pass the mode to the solver, which rejects it.
        differentiable = torch.is_grad_enabled() and any(given.requires_grad for given in inputs)
        mode = self.settings.mode if differentiable else None
        (q,) = self.layer(*inputs, solver_args={"mode": mode} if mode else {})
        return spread(self.mdp, q)


def require(module: str) -> Any:
    """Import an optional package; the error says how to install it."""
    with extra("reference", f"torch_occ.reference needs {module.partition('.')[0]}"):
        return import_module(module)


# -- the judge ---------------------------------------------------------------------------------
#
# The residuals are computed with a dense Hessian and least squares, and share no code with the
# solver. An answer is correct if
#
#     q                      grad psi(q) + loss = E'v   and   E q = b
#     d<c,q>/dloss = -u      H u = c - E'w              and   E u = 0,     H the Hessian of psi at q
#     d<c,q>/dtheta          = -<u, d(grad psi)/dtheta>


@dataclass(frozen=True)
class Equations:
    """Residuals of the equations that a correct answer satisfies.

    Each is multiplied by q(s,a), so that relative errors of rare and frequent pairs count alike.
    """

    mdp: LayeredMDP
    regularizer: Regularizer
    loss: Tensor  # (S, A)
    t: Tensor

    def residual_of_q(self, q: Tensor) -> float:
        """The larger of |grad psi(q) + loss - E'v| for the best v, relative, and |E q - b|."""
        (E, b), x = flow_constraints(self.mdp), q.detach()[self.mdp.actions]
        if not bool(((x > 0) & x.isfinite()).all()):
            return torch.inf
        slope, linear = torch.func.grad(self._psi)(x).detach(), self.loss[self.mdp.actions]
        stationarity = _off_range(E, slope + linear, x) / ((x * slope).norm() + (x * linear).norm())
        return float(torch.maximum(stationarity, (E @ x - b).abs().amax()))

    def residual_of_gradient(self, q: Tensor, c: Tensor, gradient: Tensor) -> float:
        """The larger of |c - H u - E'w| for the best w, relative to u = 0, and |E u| / |u|.

        -u is the gradient in the loss.
        """
        (E, _), x = flow_constraints(self.mdp), q.detach()[self.mdp.actions]
        u, c = -gradient[self.mdp.actions], c[self.mdp.actions]
        if not bool(((x > 0) & u.isfinite()).all()):
            return torch.inf
        H = torch.autograd.functional.hessian(self._psi, x)
        # If Omega is a single point, every c is E'w up to rounding, and u = 0 is correct.
        of_zero = _off_range(E, c, x).clamp(min=1e-12 * float((x * c).norm()))
        stationarity = _off_range(E, c - H @ u, x) / of_zero
        return float(torch.maximum(stationarity, (E @ u).norm() / u.norm().clamp(min=1e-300)))

    def implied_gradients(self, q: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """⟨gradient in the loss, d(grad psi)/dtheta⟩ for every parameter and for t."""
        x = q.detach()[self.mdp.actions].requires_grad_()
        inputs = differentiable_inputs(self.regularizer, self.t)
        (slope,) = torch.autograd.grad(self._psi(x), x, create_graph=True)
        product = (slope * gradient[self.mdp.actions]).sum()
        found = torch.autograd.grad(product, list(inputs.values()), materialize_grads=True)
        return dict(zip(inputs, found, strict=True))

    def _psi(self, x: Tensor) -> Tensor:
        return self.regularizer(spread(self.mdp, x), self.t, self.mdp)


def _off_range(E: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """min over v of |scale * (y - E'v)|."""
    A, y = scale.unsqueeze(-1) * E.to_dense().T, scale * y
    return (y - A @ torch.linalg.lstsq(A, y.unsqueeze(-1)).solution.squeeze(-1)).norm()


def differentiable_inputs(regularizer: Regularizer, t: Tensor) -> dict[str, Tensor]:
    """t, and the parameters by the last part of their name where that is unique."""
    parameters = dict(regularizer.named_parameters())
    short = [name.rpartition(".")[2] for name in parameters]
    return {
        last if short.count(last) == 1 else name: parameters[name]
        for last, name in zip(short, parameters, strict=True)
    } | {"t": t}


@dataclass(frozen=True)
class Answer:
    """One side's answer, and its errors.

    The errors of "q" and "loss" are residuals; those of the other gradients are relative errors.
    """

    name: str
    q: Tensor  # (S, A)
    # Gradients of ⟨c, q⟩ in "loss", the parameters and "t"; None if there is none.
    gradients: Mapping[str, Tensor | None]
    seconds: float = torch.nan  # to solve and differentiate once
    warning: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """All answers with their errors; print it."""

    answers: tuple[Answer, ...]
    tolerance: float
    left_out: Mapping[str, str] = field(default_factory=dict)  # what was not compared, and why

    @property
    def wrong(self) -> dict[str, list[str]]:
        """The entries that are wrong, by the name of the answer."""
        each = ((x.name, x.errors.items()) for x in self.answers)
        wrong = {
            name: [what for what, e in errors if not e <= self.tolerance] for name, errors in each
        }
        return {name: what for name, what in wrong.items() if what}

    def __str__(self) -> str:
        names = [name for name in self.answers[0].gradients if name != "loss"]
        head, rows = ["", "ms", "q: residual", "d loss: residual"], []
        for answer in self.answers:
            row = [answer.name, f"{1e3 * answer.seconds:.4g}"]
            row += [f"{answer.errors[name]:.0e}" for name in ("q", "loss")]
            for name in names:
                gradient, error = answer.gradients[name], answer.errors.get(name)
                row.append("none" if gradient is None else f"{gradient.sum():+.3e} ({error:.0e})")
            rows.append(row)
        lines = [markdown([*head, *(f"d {name} (error)" for name in names)], rows)]
        lines += [f"{each.name} warned: {each.warning}" for each in self.answers if each.warning]
        lines += [f"{name} is wrong in {', '.join(what)}." for name, what in self.wrong.items()]
        lines += [f"{name} was not compared: {why}" for name, why in self.left_out.items()]
        if not self.wrong:
            one = len(self.answers) == 1
            who = ", ".join(each.name for each in self.answers) if self.left_out or one else "All"
            verb = "satisfies" if one else "satisfy"
            lines.append(f"{who} {verb} the equations to {self.tolerance:g}.")
        return "\n".join(lines)


def judge(
    equations: Equations, c: Tensor, answers: Sequence[Answer], *, tolerance: float = 1e-3
) -> Comparison:
    """Measure every answer against the equations.

    The gradients are those of ⟨c, q⟩. H is taken at the q with the smallest residual. The gradient
    in the loss with the smallest residual implies the other gradients. If even these exceed the
    tolerance, every answer counts as wrong.
    """
    if not answers:
        raise ValueError("answers: expected at least one")
    of_q = [equations.residual_of_q(answer.q) for answer in answers]
    q = answers[of_q.index(min(of_q))].q
    given = [
        torch.zeros_like(q) if (g := answer.gradients["loss"]) is None else g for answer in answers
    ]
    of_loss = [equations.residual_of_gradient(q, c, gradient) for gradient in given]
    implied = equations.implied_gradients(q, given[of_loss.index(min(of_loss))])
    judged = []
    for answer, residual, loss_residual in zip(answers, of_q, of_loss, strict=True):
        errors = {"q": residual, "loss": loss_residual}
        for name, right in implied.items():
            if (found := answer.gradients[name]) is not None:
                same = torch.equal(found, right)
                errors[name] = 0.0 if same else float((found - right).norm() / right.norm())
        judged.append(replace(answer, errors=errors))
    return Comparison(tuple(judged), tolerance)


def compare(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    loss: Tensor,
    t: Tensor | float = 1.0,
    settings: Sequence[Settings] = ALL_SETTINGS,
    *,
    tolerance: float = 1e-3,
) -> Comparison:
    """Solve one step with torch_occ, and with cvxpylayers under each of the settings.

    Compared are q and the gradients of ⟨c, q⟩ for a fixed c. Settings whose packages are not
    installed are listed in `Comparison.left_out`; if none is installed, an ImportError says so.
    """
    if not settings:
        raise ValueError(
            "settings: expected at least one to compare with; `judge` measures answers without "
            "cvxpylayers"
        )
    named = {f"cvxpylayers, {each.name}": each for each in settings}
    left_out = {name: each.missing for name, each in named.items() if each.missing}
    if len(left_out) == len(named):
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise ImportError(f"settings: nothing to compare with. {reasons}")
    c = torch.arange(1, mdp.actions.numel() + 1, dtype=mdp.dtype).cos().view(mdp.actions.shape)
    t = torch.as_tensor(t, dtype=mdp.dtype).detach().requires_grad_()
    equations = Equations(mdp, regularizer, loss.detach(), t)
    layers: dict[str, nn.Module] = {"torch_occ": FTRLStep(mdp, regularizer)}
    # The first derivative in a process takes torch a second, which is not timed.
    ask("torch_occ", layers["torch_occ"], equations, c)
    for name, each in named.items():
        if name not in left_out:
            layers[name] = CvxpyLayer(mdp, regularizer, each)
    answers = [ask(name, layer, equations, c) for name, layer in layers.items()]
    return replace(judge(equations, c, answers, tolerance=tolerance), left_out=left_out)


def ask(name: str, layer: nn.Module, equations: Equations, c: Tensor) -> Answer:
    """Solve and differentiate once with a layer that maps (loss, t) to q."""
    loss = equations.loss.clone().requires_grad_()
    inputs = {"loss": loss} | differentiable_inputs(equations.regularizer, equations.t)
    with warnings.catch_warnings(record=True) as caught:
        # diffcp reports an inaccurate solve by a UserWarning.
        warnings.simplefilter("always", UserWarning)
        start = time.perf_counter()
        q = layer(loss, equations.t)
        found = torch.autograd.grad((c * q).sum(), list(inputs.values()), allow_unused=True)
        seconds = time.perf_counter() - start
    warned = {str(each.message) for each in caught if issubclass(each.category, UserWarning)}
    gradients = dict(zip(inputs, found, strict=True))
    return Answer(name, q.detach(), gradients, seconds, "; ".join(sorted(warned)))
