"""Check a regularizer: is it finite, convex and steep, and are its derivatives right?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_occ.mdp.checks import check_that
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import flow_residual, interior_point, occupancy
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.implicit import Setting

#: More pairs make the dense Hessian slow.
_MOST_PAIRS = 500


def check_regularizer(
    regularizer: Regularizer, mdp: LayeredMDP, t: float | None = None, *, seed: int = 0
) -> dict[str, float]:
    """Check what the step needs of psi_t, at random occupancy measures of a small MDP.

    - psi and its gradient are finite inside Omega.
    - The gradient is that of finite differences, and the Hessian that of the gradient, whatever
      structure the solver uses for it (separable, per state, joint).
    - psi is convex on Omega: Z'HZ >= 0, where the columns of Z are the directions inside Omega.
    - psi is steep: its slope towards the boundary has no limit, so that the minimum has q > 0.
    - Steps are solved and certified, and `gradcheck` and `gradgradcheck` accept their derivatives.

    Args:
        regularizer: psi.
        mdp: a small one, in double precision, with at least two actions somewhere.
        t: the episode; needed if psi has a schedule.
        seed: of the random points.

    Returns:
        The largest relative error of the gradient and the Hessian, the least eigenvalue of Z'HZ
        relative to the largest, and the largest dual residual of a step.

    Raises:
        ValueError: if a check fails; the message says which, where, and what to do.
        TypeError: if psi has a schedule, and t is missing.
        SolveError: if a step cannot be certified.
    """
    count = mdp.actions.numel()
    fine = count <= _MOST_PAIRS and not mdp.batch_shape and mdp.dtype == torch.float64
    expected = f"one MDP in double precision with at most {_MOST_PAIRS} pairs"
    given = f"{count} pairs in {mdp.dtype} with the batch shape {tuple(mdp.batch_shape)}"
    check_that(fine, "mdp", expected, f"{given}; LayeredMDP.random(3, 3, 3) will do")
    generator = torch.Generator().manual_seed(seed)
    step = FTRLStep(mdp, regularizer, backend="torch")
    now = torch.as_tensor(step.episode(t), dtype=mdp.dtype)
    psi = Setting(mdp, step.evaluator, False, now, tuple(step.evaluator.parameters(now)))
    # Z, `(S * A, dimension)`: an orthonormal basis of the directions inside Omega.
    unit = torch.eye(mdp.actions.numel(), dtype=mdp.dtype).view(-1, *mdp.actions.shape)
    E = (flow_residual(mdp, unit) - flow_residual(mdp, torch.zeros_like(unit[0]))).mT  # (S, S * A)
    masked = unit.flatten(1)[~mdp.actions.flatten()]
    _, sizes, rows = torch.linalg.svd(torch.cat([E, masked]))
    Z = rows[int((sizes > 1e-10).sum()) :].mT

    def normal() -> Tensor:
        return torch.randn(mdp.actions.shape, dtype=mdp.dtype, generator=generator)

    def policy(sharpness: float) -> Tensor:
        return torch.where(mdp.actions, sharpness * normal(), -torch.inf).softmax(-1)

    found = {"gradient": 0.0, "hessian": 0.0, "convexity": torch.inf, "dual_residual": 0.0}
    for sharpness in (0.0, 1.0, 3.0):
        q = occupancy(mdp, policy(sharpness))
        value, here = regularizer(q, now, mdp).detach(), psi.deriver(torch.Size())(q)
        if not (bool(value.isfinite()) and bool(here.gradient.isfinite().all())):
            wrong = (~here.gradient.isfinite()).nonzero()
            place = f" with no finite slope in {mdp.locate(int(wrong[0, 0]))}" if len(wrong) else ""
            raise ValueError(
                f"regularizer: psi is {float(value)}{place}, at the occupancy of a random policy "
                f"(seed {seed}); it must be finite wherever q(s,a) > 0"
            )
        H = here.hessian.to_full().matrix
        along = (Z @ (Z.mT @ normal().flatten())).view_as(q)
        along = along * (0.5 * q[mdp.actions] / along[mdp.actions].abs()).min()
        h = 1e-5
        ends = [q + h * along, q - h * along]
        values = [regularizer(x, now, mdp).detach() for x in ends]
        gradients = [psi.gradient(x).detach()[mdp.actions] for x in ends]
        slope = (here.gradient * along).sum()
        bend = (H @ along.flatten()).view_as(q)[mdp.actions]
        for name, exact, pair in (("gradient", slope, values), ("hessian", bend, gradients)):
            apart = ((pair[0] - pair[1]) / (2 * h) - exact).abs().max()
            size = exact.abs().max() + pair[0].abs().max() * 1e-6
            found[name] = max(found[name], float(apart / size))
            if not found[name] < 1e-4:
                raise ValueError(
                    f"regularizer: its {name} differs from finite differences by "
                    f"{found[name]:.1e} of its size; is psi twice differentiable in torch's "
                    "operations, without detach() or item()?"
                )
        eigenvalues = torch.linalg.eigvalsh(Z.mT @ H @ Z)
        least = float(eigenvalues[0] / eigenvalues.abs().max())
        found["convexity"] = min(found["convexity"], least)
        if not least > -1e-9:
            raise ValueError(
                f"regularizer: not convex on Omega: Z'HZ has the eigenvalue {eigenvalues[0]:.3e} "
                f"at the occupancy of a random policy (seed {seed}); check signs and weights"
            )
    # Slopes of psi from three points ever closer to a vertex of Omega.
    vertex, middle, slopes = occupancy(mdp, policy(1e6)), interior_point(mdp), []
    for share in (1e-4, 1e-8, 1e-12):
        slope = psi.gradient(vertex + share * (middle - vertex)).detach() * (middle - vertex)
        slopes.append(float(slope[mdp.actions].sum()))
    before, after = slopes[0] - slopes[1], slopes[1] - slopes[2]
    if not (before > 0 and after > 0.25 * before):
        raise ValueError(
            "regularizer: not steep: its slope towards the boundary is "
            f"{slopes[0]:.4g}, {slopes[1]:.4g}, {slopes[2]:.4g} at distances of 1e-4, 1e-8, 1e-12 "
            "and has a limit, so the minimum may lie on the boundary, where it has no derivative; "
            "add a LogBarrier or an entropy"
        )
    checks: Any = (10.0, torch.autograd.gradcheck), (0.1, torch.autograd.gradgradcheck)
    for scale, check in checks:
        loss = (scale * normal()).requires_grad_()
        solution = step.solve(loss.detach(), t)
        found["dual_residual"] = max(found["dual_residual"], float(solution.dual_residual.max()))
        weights = normal()

        def paid(x: Tensor, weights: Tensor = weights) -> Tensor:
            return (step(x, t) * weights).sum()

        options: Any = {"raise_exception": False, "fast_mode": True, "atol": 1e-5, "rtol": 1e-3}
        if not check(paid, loss, **options):
            raise ValueError(
                f"regularizer: torch.autograd.{check.__name__} rejects a step with losses of "
                f"{scale}; are the derivatives of psi continuous?"
            )
    return found
