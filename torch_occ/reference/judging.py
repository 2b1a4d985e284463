"""Residuals of an answer in the equations that it must satisfy.

They are computed with a dense Hessian and least squares, and share no code with the solver. An
answer is correct if

    q                      grad psi(q) + loss = E'v   and   E q = b
    d<c,q>/dloss = -u      H u = c - E'w              and   E u = 0,      H the Hessian of psi at q
    d<c,q>/dtheta          = -<u, d(grad psi)/dtheta>
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.reference import cvxpy_step
from torch_occ.reference.cvxpy_step import Settings
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.ftrl import FTRLStep


@dataclass(frozen=True)
class Equations:
    """Residuals of the equations that a correct answer satisfies.

    The equation of a pair is multiplied by q(s,a), so that the same relative error of q counts the
    same in rare and in frequent pairs.
    """

    mdp: LayeredMDP
    regularizer: Regularizer
    loss: Tensor  # (S, A)
    t: Tensor

    def residual_of_q(self, q: Tensor) -> float:
        """The larger of two residuals of q; infinite unless q > 0.

        They are |grad psi(q) + loss - E'v| for the best v, relative to its terms, and |E q - b|.
        """
        x, (E, b) = q.detach()[self.mdp.actions], _constraints(self.mdp)
        if not bool(((x > 0) & x.isfinite()).all()):
            return torch.inf
        slope, linear = torch.func.grad(self._psi)(x).detach(), self.loss[self.mdp.actions]
        stationarity = _off_range(E, slope + linear, x) / ((x * slope).norm() + (x * linear).norm())
        return float(torch.maximum(stationarity, (E @ x - b).abs().amax()))

    def residual_of_gradient(self, q: Tensor, c: Tensor, gradient: Tensor) -> float:
        """The larger of two residuals of the gradient in the loss, -u.

        They are |c - H u - E'w| for the best w, relative to u = 0, and |E u|, relative to |u|.
        """
        x, (E, _) = q.detach()[self.mdp.actions], _constraints(self.mdp)
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
        return self.regularizer(cvxpy_step.spread(self.mdp, x), self.t, self.mdp)


def _constraints(mdp: LayeredMDP) -> tuple[Tensor, Tensor]:
    E, b = cvxpy_step.flow_constraints(mdp)
    return E.to_dense(), b


def _off_range(E: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """min over v of |scale * (y - E'v)|."""
    A, y = scale.unsqueeze(-1) * E.T, scale * y
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
        found = {}
        for answer in self.answers:
            wrong = [what for what, e in answer.errors.items() if not e <= self.tolerance]
            found |= {answer.name: wrong} if wrong else {}
        return found

    def __str__(self) -> str:
        names = [name for name in self.answers[0].gradients if name != "loss"]
        head = [
            "",
            "ms",
            "q: residual",
            "d loss: residual",
            *(f"d {name} (error)" for name in names),
        ]
        rows = [head]
        for answer in self.answers:
            row = [answer.name, f"{1e3 * answer.seconds:.4g}"]
            row += [f"{answer.errors[name]:.0e}" for name in ("q", "loss")]
            for name in names:
                gradient, error = answer.gradients[name], answer.errors.get(name)
                row.append("none" if gradient is None else f"{gradient.sum():+.3e} ({error:.0e})")
            rows.append(row)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
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

    Returns:
        The answers with their errors.

    Raises:
        ValueError: if there is no answer.
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
    settings: Sequence[Settings] = cvxpy_step.ALL_SETTINGS,
    *,
    tolerance: float = 1e-3,
) -> Comparison:
    """Solve one step with torch_occ, and with cvxpylayers under each of the settings.

    Compared are q and the gradients of ⟨c, q⟩ for a fixed c. Settings whose packages are not
    installed are listed in `Comparison.left_out`, and when the comparison is printed.

    Returns:
        All answers with their residuals.

    Raises:
        ImportError: if none of the settings is installed.
        ValueError: if there are no settings.
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
            layers[name] = cvxpy_step.CvxpyLayer(mdp, regularizer, each)
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
