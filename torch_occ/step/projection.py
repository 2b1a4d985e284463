"""The Kullback-Leibler projection onto occupancy measures whose transitions have bounds.

    argmin over q in Delta of learning_rate ⟨q, loss⟩ + KL(q || reference)

Write q(s,a,s') = w(s,a) p(s'|s,a), and the reference as w̃ p̃. Only the flow constraints couple
the rows of transitions. With their multipliers v(s), and v = 0 at the end, every row is solved in
closed form:

    G(s,a; v) = min of sum_s' p(s') (log(p(s') / p̃(s')) + v(s'))   over lower <= p <= upper,

with p = clip(c exp(log p̃ - v), lower, upper), where c makes the sum one. Then

    w(s,a) = w̃(s,a) exp(v(s) - rate * loss(s,a) - G(s,a; v)),
    D(v)   = sum_s initial(s) v(s) - sum w(s,a),     dD/dv(s) = inflow of w - w(s).

D is concave. Instead of v, the iteration moves g(s) = log w(s), as torch_occ.step.entropic does. A
pass backward through the layers gives v, the policy and p; a pass forward gives the occupancy u of
that policy under p, so every iterate satisfies all constraints. It is solved when log u = g.

**Newton's method.** With P the transitions of the policy, dv = dg + P dv, and dD = ⟨u - w, dg⟩. The
direction maximizes the quadratic model

    ⟨u - w, dg⟩ - 1/2 ⟨dg, Lambda dg⟩ - 1/2 ⟨dv, N dv⟩,

where N is the part of the Hessian that the changes of policies and of p contribute, block-diagonal
over layers. Lambda is the logarithmic mean of u and w. At the solution it is w, which is Newton's
method; if N = 0, the direction is log u - g, which solves the equation at once, however large it
is. Since Lambda and N are positive, it is always an ascent direction; steps are halved until D has
grown enough. Layers are eliminated one after the other, from matrices I + Y with Y >= 0.

torch_occ.engine.projection solves the problem, compiled. **Derivatives** come from here: the
equations are made of differentiable operations, and two Newton steps from the solution leave its
value unchanged and give its first three derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import torch
from torch import Tensor, nn

from torch_occ._support.choices import later
from torch_occ._support.private import carries_derivative
from torch_occ._support.processes import for_each
from torch_occ.mdp.checks import broadcast, row_tolerance
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import join
from torch_occ.regularizers.parameters import with_rank
from torch_occ.step.entropic import Poisoned, in_front
from torch_occ.step.solution import (
    Options,
    Status,
    check_batches,
    check_like,
    check_transforms,
    report,
)

#: The smallest batch that is shared among threads.
_SHARED = 64


class Active(NamedTuple):
    """The entries at a bound, `(*batch, S, A, n)`; the others are free."""

    low: Tensor
    high: Tensor


class Row(NamedTuple):
    """The minimizer of a row, and the minimum."""

    p: Tensor  # (*batch, S, A, n)
    free: Tensor  # (*batch, S, A, n), p where it is free, zero at bounds
    cost: Tensor  # (*batch, S, A), G


def closest(scores: Tensor, lower: Tensor, upper: Tensor, active: Active) -> Row:
    """Return the minimizer for known active bounds, in differentiable operations."""
    low, high = active
    free = ~(low | high)
    some = free.any(-1, keepdim=True)
    bound = torch.where(low, lower, upper)
    fixed = torch.where(free, 0.0, bound)
    # Divide among the free entries what the others leave. If there is none, avoid 0 / 0.
    smallest = torch.finfo(scores.dtype).tiny
    rest = torch.where(some, (1 - fixed.sum(-1, keepdim=True)).clamp(min=smallest), 1.0)
    among = torch.where(free | ~some, scores, -torch.inf)
    total = among.logsumexp(-1, keepdim=True)
    # Rounding may move an entry that is free by a hair across its bound.
    share = torch.where(free, rest * (among - total).exp(), 0.0)
    share = torch.where(free, share.clamp(lower, upper), 0.0)
    log_bound = torch.where(fixed > 0, fixed, 1.0).log()
    terms = torch.where(fixed > 0, fixed * (log_bound - scores), 0.0)
    cost = terms.sum(-1) + torch.where(some, rest * (rest.log() - total), 0.0).squeeze(-1)
    return Row(fixed + share, share, cost)


# -- Checks of the arguments of a projection; errors name the layer, state, action and successo ----


def check_dense(mdp: LayeredMDP) -> None:
    """Check that rows of transitions can have bounds: the layers must be dense.

    Raises:
        TypeError: if it is not an MDP.
        ValueError: if a layer is sparse.
    """
    if not isinstance(mdp, LayeredMDP):
        raise TypeError(f"mdp: expected an occ.LayeredMDP, got {type(mdp).__name__}")
    if mdp.is_sparse:
        raise ValueError(
            "mdp: its layers are sparse, and the projection needs a number for every successor; "
            "use mdp.to_dense()"
        )


def check_arguments(
    mdp: LayeredMDP,
    q: Tensor,
    loss: Tensor,
    rate: Tensor,
    rows: dict[str, Sequence[Tensor]],
) -> torch.Size:
    """Check shapes, number types and devices; return the largest batch shape.

    Args:
        rows: `transitions`, `lower` and `upper`, each with one tensor per layer.

    Raises:
        TypeError: if an argument is not a tensor, or not a sequence of tensors.
        ValueError: if a shape, a number type or a device does not fit the MDP, or batch shapes do
            not broadcast.
    """
    check_like("q", q, mdp)
    check_like("loss", loss, mdp)
    shapes = {"q": q.shape[:-2], "loss": loss.shape[:-2], "learning_rate": rate.shape}
    for name, tensors in rows.items():
        if isinstance(tensors, Tensor) or len(tensors) != mdp.horizon:
            found = "a tensor" if isinstance(tensors, Tensor) else f"{len(tensors)} tensors"
            raise ValueError(
                f"{name}: expected {mdp.horizon} tensors, one per layer, as mdp.transitions, got "
                f"{found}"
            )
        for k, tensor in enumerate(tensors):
            check_layer(mdp, f"{name}[{k}]", k, tensor)
            shapes[f"{name}[{k}]"] = tensor.shape[:-3]
    check_batches(shapes)
    return max(shapes.values(), key=len)


def check_layer(mdp: LayeredMDP, name: str, k: int, x: Tensor) -> None:
    """Check the shape, number type and device of a tensor of layer k."""
    after = mdp.layer_sizes[k + 1] if k + 1 < mdp.horizon else 1
    expected = (mdp.layer_sizes[k], mdp.num_actions, after)
    text = "(*batch, " + ", ".join(map(str, expected)) + ")"
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor of shape {text}, got {type(x).__name__}")
    if tuple(x.shape[-3:]) != expected:
        raise ValueError(f"{name}: expected shape {text}, got {tuple(x.shape)}")
    if x.dtype != mdp.dtype or x.device != mdp.device:
        raise ValueError(
            f"{name}: is {x.dtype} on {x.device}, the MDP {mdp.dtype} on {mdp.device}; "
            "convert one of them"
        )


def check_reference(
    mdp: LayeredMDP,
    q: Tensor,
    loss: Tensor,
    rate: Tensor,
    rows: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
) -> None:
    """Check the values of plain tensors; runs inside every transform.

    Raises:
        ValueError: if a number is not finite, or has the wrong sign; if no distribution is between
            the bounds of a row; or if a state cannot be reached under the upper bounds.
    """
    available = mdp.actions
    _all("q", mdp, 0, q, ~available | ((q > 0) & q.isfinite()), "expected a positive number")
    _all("loss", mdp, 0, loss, ~available | loss.isfinite(), "expected a finite number")
    wrong = (~((rate >= 0) & rate.isfinite())).nonzero()
    if len(wrong):
        value = float(rate[tuple(wrong[0])])
        raise ValueError(f"learning_rate: expected a number of at least 0, got {value}")
    reached = mdp.initial > 0
    masks = mdp.split(available, -2)
    for k, (p, lower, upper) in enumerate(zip(*rows, strict=True)):
        start, unused = mdp.layer_slices[k].start, ~masks[k].unsqueeze(-1)
        _check_rows(mdp, k, p, lower, upper, unused)
        if not bool(reached.all()):
            *batch, state = (~reached).nonzero()[0].tolist()
            _raise("upper", mdp, batch, start + state, "cannot be reached; every policy avoids it")
        reached = ((upper > 0) & ~unused).flatten(-3, -2).any(-2)


def _check_rows(
    mdp: LayeredMDP, k: int, p: Tensor, lower: Tensor, upper: Tensor, unused: Tensor
) -> None:
    """Check the reference and the bounds of layer k; `unused` `(S_k, A, 1)` marks masked pairs."""
    start, tolerance = mdp.layer_slices[k].start, row_tolerance(mdp.dtype)
    good = unused | ((lower >= 0) & lower.isfinite())
    _all("lower", mdp, start, lower, good, "expected a number of at least 0")
    good = unused | (upper.isfinite() & (upper >= lower))
    _all("upper", mdp, start, upper, good, "expected at least the lower bound, {:.6g}", lower)
    good = unused | (p.isfinite() & (p >= 0) & ((p > 0) | (upper <= 0)))
    _all(
        *("transitions", mdp, start, p, good),
        "expected a positive number where the upper bound is positive ({:.6g}); what is zero "
        "stays zero",
        upper,
    )
    for name, sums, wrong in (
        ("lower", lower.sum(-1), lower.sum(-1) > 1 + tolerance),
        ("upper", upper.sum(-1), upper.sum(-1) < 1 - tolerance),
    ):
        bad = (wrong & ~unused.squeeze(-1)).nonzero()
        if len(bad):
            *batch, state, action = bad[0].tolist()
            side = "at most" if name == "lower" else "at least"
            total = float(sums[tuple(bad[0])])
            message = f"the bounds sum to {total:.12g}; expected {side} 1"
            _raise(name, mdp, batch, start + state, message, action)


def _all(
    name: str,
    mdp: LayeredMDP,
    start: int,
    x: Tensor,
    good: Tensor,
    expected: str,
    other: Tensor | None = None,
) -> None:
    """Raise a ValueError for the first entry that is not good; `other` goes into its message."""
    if bool(good.all()):
        return
    place = (~good).nonzero()[0]
    values = [float(y.expand(good.shape)[tuple(place)]) for y in (x, other) if y is not None]
    events = 2 if name in ("q", "loss") else 3
    batch, (state, action, *after) = place[:-events].tolist(), place[-events:].tolist()
    _raise(
        *(name, mdp, batch, start + state),
        f"is {values[0]:.6g}; " + expected.format(*values[1:]),
        *(action, *after),
    )


def _raise(
    name: str,
    mdp: LayeredMDP,
    batch: Sequence[int],
    state: int,
    message: str,
    action: int | None = None,
    successor: int | None = None,
) -> NoReturn:
    where = [f"batch element {tuple(batch)}"] if batch else []
    where.append(mdp.locate(state))
    where += [] if action is None else [f"action {action}"]
    where += [] if successor is None else [f"successor {successor}"]
    raise ValueError(f"{name}: {', '.join(where)}: {message}")


# -- The equations of the dual problem, in differentiable operations -------------------------------


class DualProblem(NamedTuple):
    """A batch of projections. Tensors of layers are `(*batch, S_k, A, S_{k+1})`."""

    initial: Tensor  # (*batch, S_0)
    log_weight: Tensor  # (*batch, S, A), log w̃ - rate * loss; minus infinity on masked pairs
    log_rows: tuple[Tensor, ...]  # log p̃ of every layer
    lower: tuple[Tensor, ...]
    upper: tuple[Tensor, ...]


class DualPoint(NamedTuple):
    """What follows from a guess of log w(s); tuples have one entry per layer."""

    value: tuple[Tensor, ...]  # v
    policy: tuple[Tensor, ...]  # (*batch, S_k, A)
    rows: tuple[Tensor, ...]  # p
    free: tuple[Tensor, ...]  # p where it is free, zero at bounds
    q: Tensor  # (*batch, S, A), u(s) pi(a|s)
    off: Tensor  # (*batch, S), log u - g


def unfold_rows(
    mdp: LayeredMDP, problem: DualProblem, guess: Tensor, active: Sequence[Active]
) -> DualPoint:
    """Solve the rows backward and follow the policy forward.

    Args:
        active: the active bounds of every layer.
    """
    weights, guesses = mdp.split(problem.log_weight, -2), mdp.split(guess, -1)
    behind = guess.new_zeros(1)
    values: list[Tensor] = []
    policies: list[Tensor] = []
    rows: list[Row] = []
    for k in reversed(range(mdp.horizon)):
        scores = problem.log_rows[k] - behind[..., None, None, :]
        row = closest(scores, problem.lower[k], problem.upper[k], active[k])
        logits = weights[k] - row.cost
        total = logits.logsumexp(-1)
        behind = guesses[k] - total
        values.insert(0, behind)
        policies.insert(0, (logits - total.unsqueeze(-1)).exp())
        rows.insert(0, row)
    u, q = problem.initial, []
    occupied = []
    for policy, row in zip(policies, rows, strict=True):
        occupied.append(u)
        q.append(u.unsqueeze(-1) * policy)
        u = inflow_of(row.p, q[-1])
    return DualPoint(
        tuple(values),
        tuple(policies),
        tuple(row.p for row in rows),
        tuple(row.free for row in rows),
        join(q, 2),
        join(occupied, 1).log() - guess,
    )


def inflow_of(p: Tensor, x: Tensor) -> Tensor:
    """The mass that arrives in each successor, `(*batch, n)`."""
    return (p * x.unsqueeze(-1)).sum((-3, -2))


def direction(mdp: LayeredMDP, at: DualPoint, guess: Tensor) -> Tensor:
    """Return the Newton direction dg `(*batch, S)`.

    With X the curvature that the layers before see in dv, and s = Lambda^(-1/2),

        Y = s X s,  B = (I + Y)^-1,
        forward:   X <- N + P' s^-1 Y B s^-1 P,   y <- P' s^-1 (B s y - Y B s r),   r = u - w,
        backward:  dg = s B s (r + y) - s B Y s^-1 P dv,    dv <- dg + P dv.
    """
    mean = guess.exp() * _relative_growth(at.off)  # Lambda
    parts = zip(mdp.split(mean, -1), mdp.split(mean * at.off, -1), strict=True)
    curvature: Tensor | None = None  # X, zero in the first layer
    pull = torch.zeros_like(at.value[0])  # y
    stack = []
    for k, (weight, force) in enumerate(parts):
        s = weight.rsqrt()
        if curvature is None:
            scaled = torch.zeros_like(weight).unsqueeze(-1) * weight.unsqueeze(-2)
        else:
            scaled = s.unsqueeze(-1) * curvature * s.unsqueeze(-2)
        inverse = torch.linalg.inv_ex(
            scaled + torch.eye(scaled.shape[-1], dtype=s.dtype, device=s.device)
        ).inverse
        onward = (at.policy[k].unsqueeze(-1) * at.rows[k]).sum(-2)  # P, (*batch, S_k, n)
        stack.append((s, scaled, inverse, force + pull, onward))
        if k + 1 < mdp.horizon:
            lost = scaled @ inverse
            back = onward.mT / s.unsqueeze(-2)  # P' s^-1
            curvature = _curvature(at, k, weight, onward) + back @ lost @ back.mT
            pull = _times(back, _times(inverse, s * pull) - _times(lost, s * force))
    ahead = guess.new_zeros(1)
    steps: list[Tensor] = []
    for s, scaled, inverse, force, onward in reversed(stack):
        carried = _times(onward, ahead)
        dg = s * _times(inverse, s * force - _times(scaled, carried / s))
        ahead = dg + carried
        steps.insert(0, dg)
    return join(steps, 1)


def _curvature(at: DualPoint, k: int, weight: Tensor, onward: Tensor) -> Tensor:
    """Return N of layer k + 1, `(*batch, n, n)`; `weight` is Lambda of layer k."""
    pairs = (weight.unsqueeze(-1) * at.policy[k]).unsqueeze(-1)  # (*batch, S_k, A, 1)
    centred, free = at.rows[k] - onward.unsqueeze(-2), at.free[k]
    total = free.sum(-1, keepdim=True)
    share = pairs / torch.where(total > 0, total, 1.0)
    moving = torch.diag_embed((pairs * free).sum((-3, -2)))
    return moving + _gram(centred, pairs) - _gram(free, share)


def _gram(x: Tensor, weight: Tensor) -> Tensor:
    """The sum of weight x x' over the pairs, `(*batch, n, n)`."""
    return x.flatten(-3, -2).mT @ (weight * x).flatten(-3, -2)


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def _relative_growth(x: Tensor) -> Tensor:
    """(exp(x) - 1) / x, smooth at 0."""
    small = x.abs() < 1e-4
    return torch.where(small, 1 + x / 2 + x * x / 6, x.expm1() / torch.where(small, 1.0, x))


# -- The Kullback-Leibler projection as a torch module ---------------------------------------------
#
# argmin over q in Delta of learning_rate ⟨q, loss⟩ + KL(q || reference)


Rows = tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]


class Projection(NamedTuple):
    """The projection q(s,a,s') = q(s,a) p(s'|s,a) and its certificate, for a batch of problems."""

    q: Tensor  # (*batch, S, A)
    transitions: tuple[Tensor, ...]  # p of every layer, (*batch, S_k, A, S_{k+1})
    value: Tensor  # (*batch, S), the multipliers v of the flow constraints
    status: Tensor  # (*batch,), numbers of `Status`
    steps: Tensor  # (*batch,), the number of Newton steps
    flow_residual: Tensor  # (*batch,), the largest violation of a flow constraint, relative to q(s)
    dual_residual: Tensor  # (*batch,), the largest error of a stationarity condition of log q

    @property
    def converged(self) -> Tensor:
        """`(*batch,)`, whether each element was solved and certified."""
        return self.status == Status.CONVERGED


class KLProjection(nn.Module):
    """The Kullback-Leibler projection onto occupancy measures whose transitions have bounds.

        argmin of learning_rate ⟨q, loss⟩ + KL(q || reference)    over q(s,a,s') >= 0 with
        sum_{a,s'} q(s,a,s') = initial(s), or the sum of q(.,.,s) over the layer before,
        lower(s'|s,a) q(s,a) <= q(s,a,s') <= upper(s'|s,a) q(s,a).

    KL is the unnormalized divergence, sum q log(q / reference) - q + reference. This is the step of
    UOB-REPS (Jin, Jin, Luo, Sra and Yu, 2020). The published dual has two multipliers per
    (s, a, s'); here they are eliminated, and one multiplier per state is left
    (torch_occ.step.projection). It is solved in compiled code, on the CPU and in double precision
    whatever the device and the number type of the MDP.

    It is differentiable with respect to q, transitions, bounds, loss, learning rate and the initial
    distribution of the MDP, to the third order, also in forward mode. The derivative is that of the
    active bounds at the solution; where a bound is only just active, it is one-sided.

    Args:
        mdp: its layout and its initial distribution are used, its probabilities are not.
        tolerance: the largest dual residual (a relative error of q) that counts as solved; by
            default eps^(2/3).
        max_steps: the largest number of Newton steps.

    Raises:
        ValueError: if the layers of the MDP are sparse, or an option is wrong.

    Example:
        >>> mdp = LayeredMDP.random(horizon=3, width=3, num_actions=3)
        >>> project = KLProjection(mdp)
        >>> lower = [(p - 0.1).clamp(min=0) for p in mdp.transitions]
        >>> upper = [(p + 0.1).clamp(max=1) for p in mdp.transitions]
        >>> q, p = project(interior_point(mdp), mdp.transitions, lower, upper, loss, 0.1)
    """

    def __init__(
        self, mdp: LayeredMDP, *, tolerance: float | None = None, max_steps: int = 200
    ) -> None:
        super().__init__()
        check_dense(mdp)
        self.mdp, self.options = mdp, Options(tolerance, max_steps)

    def forward(
        self,
        q: Tensor,
        transitions: Sequence[Tensor],
        lower: Sequence[Tensor],
        upper: Sequence[Tensor],
        loss: Tensor | None = None,
        learning_rate: Tensor | float = 1.0,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return q(s,a) and p(s'|s,a) of the projection; see `solve`."""
        found = self.solve(q, transitions, lower, upper, loss, learning_rate)
        return found.q, found.transitions

    def solve(
        self,
        q: Tensor,
        transitions: Sequence[Tensor],
        lower: Sequence[Tensor],
        upper: Sequence[Tensor],
        loss: Tensor | None = None,
        learning_rate: Tensor | float = 1.0,
        *,
        check: bool = True,
    ) -> Projection:
        """Project the reference q(s,a) p(s'|s,a). Batch shapes broadcast.

        Args:
            q: positive weights `(*batch, S, A)` of the reference. They need not satisfy any
                constraint.
            transitions: p of the reference, one tensor `(*batch, S_k, A, S_{k+1})` per layer, as
                `mdp.transitions`. They must be positive where the upper bound is.
            lower: the lower bounds of the transitions, in the same form.
            upper: the upper bounds; each row needs sum(lower) <= 1 <= sum(upper).
            loss: `(*batch, S, A)`; zero by default.
            learning_rate: a number, or a tensor `(*batch,)`.
            check: whether to raise an error if an element failed.

        Returns:
            The projection, with a status per batch element.

        Raises:
            TypeError: if an argument is not a tensor.
            ValueError: if a shape or a value is wrong; it names the layer, the state, the action,
                the successor and the batch element.
            SolveError: if `check` is set and an element failed.
        """
        mdp = self.mdp
        loss = torch.zeros_like(q) if loss is None else loss
        rate = torch.as_tensor(learning_rate, dtype=mdp.dtype, device=mdp.device)
        rows = {"transitions": transitions, "lower": lower, "upper": upper}
        rank = len(check_arguments(mdp, q, loss, rate, rows))
        rank = max(rank, mdp.initial.dim() - 1)
        check_transforms()
        pairs, layers = [q, loss], [p for part in rows.values() for p in part]
        tensors = [
            *(with_rank(x, rank, 2) for x in pairs),
            *(with_rank(rate, rank, 0), with_rank(mdp.initial, rank, 1)),
            *(with_rank(x, rank, 3) for x in layers),
        ]
        task = ProjectionTask(
            mdp, self.options, lambda found: report(check, found, "the projection")
        )
        certificate, guess, found_q, value, *found = Solve.apply(
            task, *(x.detach() for x in tensors)
        )
        if not any(carries_derivative(x) for x in tensors):
            return Projection(found_q, tuple(found), value, *_certificate_of(certificate))
        problem = problem_of(mdp, tensors)
        active = [
            _active(p, low.detach(), high.detach())
            for p, low, high in zip(found, problem.lower, problem.upper, strict=True)
        ]
        at = unfold_rows(mdp, problem, guess, active)
        for _ in range(2):
            guess = guess + direction(mdp, at, guess)
            at = unfold_rows(mdp, problem, guess, active)
        return Projection(
            Poisoned.apply(at.q, certificate),
            tuple(Poisoned.apply(p, certificate) for p in at.rows),
            Poisoned.apply(join(list(at.value), 1), certificate),
            *_certificate_of(certificate),
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> Self:
        """Move the MDP together with the module."""
        super()._apply(fn, *args)
        self.mdp = self.mdp.map_tensors(fn)
        return self


@dataclass(frozen=True)
class ProjectionTask:
    """The data of a projection that are not tensors."""

    mdp: LayeredMDP
    options: Options
    report: Callable[[Projection], None]  # raises if a step failed, unless failures are allowed


def problem_of(mdp: LayeredMDP, tensors: Sequence[Tensor]) -> DualProblem:
    """Build the problem from q, loss, rate, initial distribution, transitions and bounds."""
    q, loss, rate, initial, *layers = tensors
    available, (p, lower, upper) = mdp.actions, split_rows(mdp, layers)
    log_weight = torch.where(available, q, 1.0).log() - rate[..., None, None] * loss
    log_weight = torch.where(available, log_weight, -torch.inf)
    # Masked pairs and impossible successors take no part; any numbers do.
    masks = [mask.unsqueeze(-1) for mask in mdp.split(available, -2)]
    return DualProblem(
        initial,
        log_weight,
        tuple(
            torch.where(mask & (high > 0), x, 1.0).log()
            for x, high, mask in zip(p, upper, masks, strict=True)
        ),
        tuple(torch.where(mask, x, 0.0) for x, mask in zip(lower, masks, strict=True)),
        tuple(torch.where(mask, x, 1.0) for x, mask in zip(upper, masks, strict=True)),
    )


def split_rows(mdp: LayeredMDP, layers: Sequence[Tensor]) -> Rows:
    """Transitions, lower and upper bounds, from a list of all their layers."""
    L = mdp.horizon
    return tuple(layers[:L]), tuple(layers[L : 2 * L]), tuple(layers[2 * L :])


def _active(p: Tensor, lower: Tensor, upper: Tensor) -> Active:
    """The entries of a solution that are at a bound; a certain successor is free."""
    several = p.shape[-1] > 1
    low = (p <= lower) & several
    return Active(low, (p >= upper) & ~low & several)


class Solve(torch.autograd.Function):
    """The certificate, log q(s), q, v, and p of every layer; not differentiable."""

    @staticmethod
    def forward(task: ProjectionTask, *tensors: Tensor) -> tuple[Tensor, ...]:
        mdp, (q, loss, rate, _, *layers) = task.mdp, tensors
        check_reference(mdp, q, loss, rate, split_rows(mdp, layers))
        events = (2, 2, 0, 1, *(3 for _ in layers))
        batch = broadcast(*(x.shape[: x.dim() - n] for x, n in zip(tensors, events, strict=True)))
        count = batch.numel()
        flat = [
            x.expand(batch + x.shape[x.dim() - n :]).reshape(count, -1).double().cpu()
            for x, n in zip(tensors, events, strict=True)
        ]
        tables = [torch.cat(x, -1) for x in split_rows(mdp, flat[4:])]
        rows = [x.numpy().copy() for x in (*flat[:4], *tables)]
        certificate, values = _solve_compiled(task, *rows)
        shapes = [x.shape[-3:] for x in layers[: mdp.horizon]]
        parts = np.split(rows[4], np.cumsum([x.numel() for x in shapes])[:-1], -1)
        found = [
            torch.from_numpy(x).reshape(*batch, *shape).to(q.device, q.dtype)
            for x, shape in zip(
                (certificate, values[:, 1], rows[0], values[:, 0], *parts),
                ((4,), (mdp.num_states,), q.shape[-2:], (mdp.num_states,), *shapes),
                strict=True,
            )
        ]
        task.report(Projection(found[2], tuple(found[4:]), found[3], *_certificate_of(found[0])))
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], task: ProjectionTask, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        outputs = Solve.apply(task, *in_front(info.batch_size, in_dims[1:], tensors))
        return outputs, (0,) * len(outputs)


def _solve_compiled(task: ProjectionTask, *rows: Any) -> tuple[Any, Any]:
    """Project q and the transitions in place; return the certificate `(N, 4)`, and v and log q(s).

    Args:
        rows: q, loss, rate, initial, transitions, lower and upper bounds, one row per element.
    """
    engine, mdp, options = later("step.arrays").projection, task.mdp, task.options
    layout = engine.layout_of(mdp.layer_sizes, mdp.actions.cpu().numpy())
    count, certificate = len(rows[0]), np.zeros((len(rows[0]), 4))
    values = np.zeros((count, 2, mdp.num_states))
    limits = (options.tolerance_in(mdp.dtype), options.max_steps)
    threads = min(torch.get_num_threads(), count) if count >= _SHARED else 1

    def share(i: int) -> None:
        own = slice(i * count // threads, (i + 1) * count // threads)
        q, loss, rate, initial, *tables = (x[own] for x in rows)
        engine.project_batch(
            layout,
            engine.Reference(q, *tables, initial),
            loss,
            rate[:, 0],
            limits,
            values[own],
            certificate[own],
            engine.make_scratch(layout),
        )

    for_each(share, threads)
    return certificate, values


def _certificate_of(certificate: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Status, steps, flow residual and dual residual."""
    status, steps, flow, dual = certificate.unbind(-1)
    return status.long(), steps.long(), flow, dual
