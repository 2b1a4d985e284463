"""The step with a smooth convex function of a few features of q.

q = argmin over q in Omega of ⟨q, L⟩ + F(G q) + psi_t(q),        (G q)_i = ⟨G_i, q⟩

At the solution, F acts on the step as an additional loss G'y with the prices y = F'(G q). So the
features z = G q solve m equations,

    r(z) = z - G q(F'(z)) = 0,        q(y) = solution of the step for the loss L + G'y,

with the Jacobian J = I + M F''(z), M = G Pi G', where -Pi is the derivative of q with respect to
the loss (torch_occ.step.implicit). M and F'' are positive semidefinite, so J is invertible,
and damped Newton steps, which shorten J^-1 r, find z.

**Steep F.** If prices move by more than psi can answer, q jumps between vertices of Omega. Then
s F is solved for a growing share s, and each solution predicts the next.

**Derivatives.** An outer step from the solution, with J held fixed, has the first derivatives of
the solution, since r = 0 there. A second one adds the second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_occ.mdp.checks import as_tensor, broadcast, check_that, check_type
from torch_occ.step.budgets import raised
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.implicit import Linearization
from torch_occ.step.solution import Solution, Status, merge, over, report
from torch_occ.step.system import matvec

#: Outer steps at one share of F, halvings of one step, and shares of F.
_STEPS, _HALVINGS, _SHARES = 40, 12, 300
#: Errors from which on the search starts again with a small share of F.
_LOST = 1e-6
#: The error of q that counts as solved, in tolerances of the step: a steep F amplifies rounding.
_SLACK = 25.0


class UtilitySolution(NamedTuple):
    """A solution of `UtilityStep`, and its certificate."""

    q: Tensor  # (*batch, S, A)
    features: Tensor  # (*batch, m), z = G q
    prices: Tensor  # (*batch, m), y = F'(z): the step alone has the same q for the loss L + G'y
    #: (*batch,), the relative change of q in one more outer step, or the step's own residual
    dual_residual: Tensor
    steps: Tensor  # (*batch,), outer steps
    status: Tensor  # (*batch,), a number of `Status`


class _FeaturePoint(NamedTuple):
    """Where the outer iteration stands: features, s F' and s F'', the step, and its response."""

    inner: Solution
    z: Tensor  # (*batch, m), NaN outside the domain of F
    y: Tensor  # (*batch, m)
    curvature: Tensor  # (*batch, m, m)
    r: Tensor  # (*batch, m)
    M: Tensor  # (*batch, m, m)
    J: Tensor  # (*batch, m, m), the identity where it is not finite
    dz: Tensor  # (*batch, m), the full outer step
    error: Tensor  # (*batch,), of q; infinite where the step failed

    def merge(self, other: _FeaturePoint, where: Tensor) -> _FeaturePoint:
        """Return `other` at the elements given by `where` `(*batch,)`, this one elsewhere."""
        inner = self.inner.merge(other.inner, where)
        return _FeaturePoint(inner, *merge(where, other[1:], self[1:]))


class UtilityStep(nn.Module):
    """The FTRL step with a convex function of features of q in its objective.

        q_t = argmin over q in Omega of ⟨q, cumulative_loss⟩ + F(G q) + psi_t(q)

    It is differentiable, twice, in what the step is differentiable in, in G, and in the parameters
    of F. Examples of F: a distance to the features of an expert (apprenticeship), a soft maximum of
    several objectives, -sum log z_i (fairness), sum z_i log z_i (entropy of visits to regions).

    Args:
        step: the step without F, without budgets.
        features: G, `(m, S, A)` or `(*batch, m, S, A)`; values on masked pairs are ignored.
        utility: F, a function of z `(*batch, m)` that returns `(*batch,)`, each element by itself:
            convex, with two derivatives, finite at the features of every positive q. An
            `nn.Module` brings its parameters along.

    Raises:
        TypeError, ValueError: if an argument is wrong.

    Example:
        >>> step = FTRLStep(mdp, ConditionalEntropy())
        >>> plan = UtilityStep(step, features, lambda z: -z.log().sum(-1))
        >>> q = plan(loss)
    """

    features: Tensor

    def __init__(
        self, step: FTRLStep, features: Tensor, utility: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        features = as_tensor(features)
        check_type("step", step, FTRLStep, "an FTRLStep")
        if step.constraints is not None:
            raise ValueError("step: has budgets; make one without, F can put a price on a cost")
        check_type("utility", utility, Callable, "a function of z")
        fine = features.dim() > 2 and features.shape[-2:] == step.interior.shape[-2:]
        form = "shape (*batch, m, {}, {}), m tables of (S, A)".format(*step.interior.shape[-2:])
        check_that(fine, "features", form, tuple(features.shape))
        if not bool(torch.isfinite(features[..., step.mdp.actions]).all()):
            raise ValueError("features: expected finite numbers on all pairs that exist")
        self.step, self.utility = step, utility
        self.register_buffer("features", features)

    def forward(self, cumulative_loss: Tensor, t: Tensor | float | None = None) -> Tensor:
        """Return q, `(*batch, S, A)`; arguments and errors are those of `solve`."""
        return self.solve(cumulative_loss, t).q

    def solve(
        self, cumulative_loss: Tensor, t: Tensor | float | None = None, *, check: bool = True
    ) -> UtilitySolution:
        """Solve the step with F and certify the solution.

        Args:
            cumulative_loss: `(*batch, S, A)`.
            t: the episode, as in `FTRLStep.solve`.
            check: whether to raise `SolveError` if an element fails.

        Raises:
            SolveError: if an element could not be certified; NOT_CONVEX if F is not convex there.
            TypeError, ValueError: if an argument is wrong, or F has a wrong shape.
        """
        search = _FeatureSearch(self, cumulative_loss, t)
        point, steps = search.newton(search.at(search.first, 1.0), 1.0)
        lost = ~(point.error <= _LOST)
        if bool(lost.any()):
            again, more = search.follow(lost)
            point, steps = point.merge(again, lost), steps + torch.where(lost, more, 0)
        q, z, y = point.inner.q, point.z, point.y
        if torch.is_grad_enabled():
            # Differentiable outer steps. The numbers do not change, but for rounding.
            for last in (False, False, True):
                y = search.slopes(z)[0]
                q = search.answer(cumulative_loss, y).q
                found = search.gather(q)
                z = found if last else z - torch.linalg.solve(point.J, z - found)
        error = torch.maximum(point.error, point.inner.dual_residual)
        status = point.inner.status
        failed = (status == Status.CONVERGED) & ~(error <= _SLACK * search.tolerance)
        status = torch.where(failed, int(Status.STALLED), status)
        # F is concave where it has a negative curvature, beyond rounding errors.
        least, most = torch.linalg.eigvalsh(_finite(point.curvature)).aminmax(dim=-1)
        rounding = y.abs().amax(-1) / z.abs().amax(-1).clamp(min=1e-200)
        concave = least < -1e-9 * (most.abs() + rounding)
        status = torch.where(concave, int(Status.NOT_CONVEX), status)
        solution = UtilitySolution(q, z, y, error, steps, status)
        report(check, solution, "the step with a utility")
        return solution


class _FeatureSearch:
    """The search for the features of one call of `UtilityStep`, without a graph."""

    def __init__(self, owner: UtilityStep, loss: Tensor, t: Tensor | float | None) -> None:
        self.step, self.utility = owner.step, owner.utility
        self.G = torch.where(self.step.mdp.actions, owner.features, 0.0)
        batch = broadcast(loss.shape[:-2], self.G.shape[:-3], torch.as_tensor(t or 1.0).shape)
        self.loss, self.t = loss.expand(*batch, *loss.shape[-2:]), t
        self.tolerance = self.step.options.tolerance_in(loss.dtype)
        with torch.no_grad():
            #: The features without F, where the search starts.
            self.first = self.gather(self.step.solve(self.loss, t, check=False).q)
        value = self.utility(self.first)
        expected = f"shape {tuple(batch)} for z of shape {tuple(self.first.shape)}"
        check_that(value.shape == batch, "utility", expected, tuple(value.shape))
        if not bool(torch.isfinite(value).all()):
            z = self.first[~torch.isfinite(value)][0].tolist()
            raise ValueError(f"utility: not finite at the features {z} of a policy")

    def answer(self, loss: Tensor, y: Tensor) -> Solution:
        """Return the step at prices y, `(*batch, m)`."""
        return self.step.solve(loss + (over(y, 2) * self.G).sum(-3), self.t, check=False)

    def gather(self, q: Tensor) -> Tensor:
        """Return G q, `(*batch, m)`."""
        return (self.G * q.unsqueeze(-3)).sum((-2, -1))

    def slopes(self, z: Tensor, curved: bool = False) -> tuple[Tensor, Tensor]:
        """Return F'(z), differentiable, and F''(z) if asked for."""
        with torch.enable_grad():
            x = z if z.requires_grad else z.detach().requires_grad_()
            total = self.utility(x).sum()
            (y,) = torch.autograd.grad(total, x, create_graph=True, materialize_grads=True)
            rows = [torch.zeros_like(y)] * y.shape[-1]
            if curved and y.requires_grad:
                parts = (y[..., i].sum() for i in range(len(rows)))
                rows = [
                    torch.autograd.grad(part, x, retain_graph=True, materialize_grads=True)[0]
                    for part in parts
                ]
        return y, torch.stack(rows, -2).detach()

    @torch.no_grad()
    def at(self, z: Tensor, share: float) -> _FeaturePoint:
        """Solve the step for the prices of a share of F at z, and linearize there."""
        y, curvature = self.slopes(z, curved=True)
        y, curvature = share * y.detach(), share * curvature
        inside = torch.isfinite(y).all(-1) & torch.isfinite(curvature).all((-2, -1))
        y = torch.where(over(inside, 1), y, 0.0)
        z = torch.where(over(inside, 1), z, torch.nan)
        inner = self.answer(self.loss, y)
        q, r, exists = raised(inner.q), z - self.gather(inner.q), self.step.mdp.actions
        t = torch.as_tensor(1.0 if self.t is None else self.t, dtype=q.dtype, device=q.device)
        batch = z.shape[:-1]
        rows = self.G.expand(*batch, *self.G.shape[-3:]).movedim(-3, 0)
        at = Linearization(self.step, torch.where(exists, q, 0.0), t.expand(batch))
        answer = at.apply(rows).movedim(0, -3)
        M = self.G.flatten(-2) @ answer.flatten(-2).mT
        J = torch.eye(M.shape[-1], dtype=q.dtype, device=q.device) + M @ curvature
        good = inner.converged & torch.isfinite(J).all((-2, -1))
        J = _finite(J)
        dz = -torch.linalg.solve(J, r)
        dy = matvec(curvature, dz)
        change = (over(dy, 2) * answer).sum(-3).abs() / torch.where(exists, q, 1.0)
        error = torch.where(good, change.amax((-2, -1)), torch.inf)
        return _FeaturePoint(inner, z, y, curvature, r, M, J, dz, error)

    @torch.no_grad()
    def newton(self, point: _FeaturePoint, share: float) -> tuple[_FeaturePoint, Tensor]:
        """Iterate at a share of F; return the last point and the outer steps of each element."""
        steps = torch.zeros(point.z.shape[:-1], dtype=torch.long, device=point.z.device)
        running = torch.ones_like(steps, dtype=torch.bool)
        for _ in range(_STEPS):
            start, todo = point, running & ~(point.error <= self.tolerance / 4)
            running, length = todo, torch.ones_like(point.error)
            before = start.dz.norm(dim=-1)
            for _ in range(_HALVINGS):
                if not bool(todo.any()):
                    break
                z = torch.where(over(todo, 1), point.z + over(length, 1) * start.dz, point.z)
                trial = self.at(z, share)
                after = torch.linalg.solve(start.J, trial.r).norm(dim=-1)
                better = todo & (after <= (1 - length / 4) * before) & trial.inner.converged
                point = point.merge(trial, better)
                todo, length = todo & ~better, length / 2
            steps += running
            running = running & ~todo  # no shorter step was better: rounding errors, or F is steep
            if not bool(running.any()):
                break
        return point, steps

    def follow(self, only: Tensor) -> tuple[_FeaturePoint, Tensor]:
        """Solve for a growing share of F, until the elements in `only` have all of it."""
        start = self.at(self.first, 0.0)
        prices = self.slopes(self.first)[0].detach()
        move = matvec(start.M, prices).abs().amax(-1)
        reach = self.G.abs().amax((-3, -2, -1)) + self.first.abs().amax(-1)
        share = min(1.0, float((0.1 * reach / move.clamp(min=1e-200))[only].min()))
        point, total = self.newton(self.at(self.first, share), share)
        ratio = 10.0
        for _ in range(_SHARES):
            if share >= 1.0 or ratio < 1.01:
                break
            new = min(1.0, share * ratio)
            # The derivative of z by log s
            dz = -torch.linalg.solve(point.J, matvec(point.M, point.y))
            log = torch.tensor(new / share, dtype=dz.dtype).log()
            trial, steps = self.newton(self.at(point.z + log * dz, new), new)
            total = total + steps
            if bool((trial.error <= _LOST)[only].all()):
                point, share, ratio = trial, new, min(2 * ratio, 100.0)
            else:
                ratio = ratio**0.5
        return self.at(point.z, 1.0) if share < 1.0 else point, total


def _finite(matrix: Tensor) -> Tensor:
    """Return the identity where a matrix is not finite, so that the others can be factored."""
    fine = torch.isfinite(matrix).all((-2, -1))
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.where(over(fine, 2), matrix, identity)
