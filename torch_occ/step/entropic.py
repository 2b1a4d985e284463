"""The FTRL step for entropies, in logarithms: q may underflow, but log q does not.

Weighted sums of `Shannon` and `ConditionalEntropy` have the form

    psi(q) = w sum q(s,a) log pi(a|s) + kappa sum u(s) log u(s),    q(s,a) = u(s) pi(a|s),

with w > 0 and kappa >= 0: kappa = w for Shannon's entropy, kappa = 0 for the conditional one. If
kappa = 0, there may be one w per state, as in dilated entropies of treeplexes.
Given a guess g of log u, the derivative of ⟨q, loss⟩ + psi(q) vanishes if

    v(s)        = kappa (1 + g(s)) - w log sum_a exp(-Q(s,a) / w),    Q = loss + P v,
    log pi(a|s) = log softmax_a(-Q(s,a) / w),
    log u(s')   = log sum_{s,a} P(s'|s,a) exp(log u(s) + log pi(a|s)),

This is soft value iteration backward through the layers, then a forward pass. The step is solved
when log u = g. If kappa = 0, nothing depends on g, and the step has a closed form.

**Newton's method.** Let rho(s,a|s') = q(s,a) P(s'|s,a) / u(s') be the probability of coming from
(s,a), P_pi and rho_pi the two kernels with the actions summed out, and C(s', .) the covariance
sum rho(s,a|s') (P(.|s,a) - P_pi(.|s)) / w. Then d(g - log u) / dg is the Jacobian

    J = I + kappa (I - rho_pi)^-1 C (I - P_pi)^-1,

inverted layer by layer. Its eigenvalues are at least 1: see the matrix M of torch_occ.step.system.
The equations are nearly piecewise linear, so full steps are taken, which may cycle. So after
FULL_STEPS iterations, half of a long step that did not reduce |log u - g| is taken back, up to four
times. If kappa > w, as in mean-field games, log pi changes kappa / w times as fast as g. Then w is
lowered from kappa in stages, each started by extrapolation: g is nearly linear in w.

**Derivatives.** The equations are made of differentiable operations. Three Newton steps from the
solution, g + J^-1 (log u - g) with a constant J, leave the value g unchanged and give its first
three derivatives with respect to the loss, w, kappa and the probabilities. Entries of q that
underflow have the derivative 0. The derivative of v is right even where all of q(s) underflows.

**Certificate.** The error of g is e = J^-1 (log u - g). That of log pi, (P v - P_pi v) / w with
v = kappa e + P_pi v, adds up over the layers behind. The dual residual is the largest error of
log q that they leave, and kappa / w |e|. In dead states, log u < log DEAD, it is relative to log u.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_occ._support.constants import FULL_STEPS, LOG_DEAD, OPEN, STALL_AFTER
from torch_occ.mdp.checks import broadcast
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import largest_exponent
from torch_occ.mdp.occupancy import flow_of, flow_source, join
from torch_occ.regularizers.base import Composition
from torch_occ.regularizers.parameters import fit
from torch_occ.regularizers.terms import keep
from torch_occ.step.newton import Shaped, conserves_mass, potential, shape_finely, spread_errors
from torch_occ.step.solution import (
    Options,
    Solution,
    Status,
    check_probabilities,
    check_values,
    event_dims_of,
    merge,
    over,
    report,
)
from torch_occ.step.system import matvec


class Entropy(NamedTuple):
    """The weights of psi."""

    weight: Tensor  # (*batch, 1 or S), w
    price: Tensor  # (*batch, 1), kappa


def entropy_of(composition: Composition, values: Sequence[Tensor]) -> Entropy:
    """Return w and kappa of psi at values of t and its parameters."""
    t, weights = values[0], composition.weigh(values).terms
    terms = zip(weights, composition.terms, strict=True)
    sums = sum(weight for weight, term in terms if term.argument == "pair"), sum(weights)
    given = [torch.as_tensor(x, dtype=t.dtype, device=t.device) for x in sums]
    weight, price = (fit(x if x.dim() else x[None, None], 1) for x in given)
    return Entropy(weight, price if price.shape[-1] == 1 else 0 * price[..., :1])


# -- kappa = 0: a closed form ----------------------------------------------------------------------


class SoftPlan(NamedTuple):
    """The solution of a step with kappa = 0."""

    q: Tensor  # (*batch, S, A)
    value: Tensor  # (*batch, S), v
    visits: list[Tensor]  # u, layer by layer
    scores: Tensor  # (*batch, S), y: v / w, or its difference from the first one of its layer
    logs: list[Tensor]  # log pi, layer by layer

    def rounding(self) -> Tensor:
        """Return the rounding error of y, which is that of log q."""
        y = self.scores.detach()
        return torch.finfo(y.dtype).eps * y.abs().amax(-1)

    def certify(self, error: Tensor) -> Solution:
        """Return the solution and its certificate, for this error of log q."""
        zero, flow = torch.zeros_like(error), _flow_error(self.q, join(self.visits, 1))
        return Solution(self.q, self.value, torch.stack((zero, zero + 1, zero, flow, error), -1))


def plan_softly(
    mdp: LayeredMDP,
    loss: Tensor,
    weight: Tensor,
    centred: bool = False,
    aim: Tensor | None = None,
) -> SoftPlan:
    """Solve the step with kappa = 0 by soft value iteration, in differentiable operations.

    Every layer takes a product and a logsumexp: y = log sum_a exp(P y - loss / w) with y = -v / w,
    and P(w y) / w in place of P y if w depends on the state.

    Args:
        centred: whether to subtract the first y of each layer from the others, so that sums along
            an episode do not lose digits. This changes no policy if P conserves mass; derivatives
            in P, which may leave that set, would be wrong.
        aim: visits z `(*batch, S, A)`. In place of q is z - y then, for the y that has the policy
            of the plan and the flow of z: E y = E z.
    """
    # Losses of masked pairs may be anything; they must not reach the derivative in w.
    scores = keep("pair", mdp, loss, 0.0) / -weight.unsqueeze(-1)
    scores = keep("pair", mdp, scores, -torch.inf)
    totals: list[Tensor] = []  # from the last layer to the first
    logs: list[Tensor] = []
    y: Tensor | None = None
    varies = weight.shape[-1] > 1
    rates = mdp.split(weight, -1) if varies else [weight] * mdp.horizon
    parts = zip(mdp.layers, mdp.split(scores, -2), rates, strict=True)
    for layer, score, rate in reversed([*parts]):
        if y is not None:
            ahead = layer.ahead(y)
            score = score + (ahead / rate.unsqueeze(-1) if varies else ahead)
        y = score.logsumexp(-1)
        logs.append(score - y.unsqueeze(-1))
        y = rate * y if varies else y
        totals.append(y)
        y = y - y.detach()[..., :1] if centred else y
    logs.reverse()
    visits, flows = [mdp.initial], []
    if aim is not None:
        aims, masses = mdp.split(aim, -2), mdp.split(aim @ aim.new_ones(aim.shape[-1]), -1)
        visits = [masses[0]]
    for k, layer in enumerate(mdp.layers):
        mass, policy = visits[k].unsqueeze(-1), logs[k].exp()  # faster than torch's softmax
        flows.append(mass * policy if aim is None else aims[k].addcmul(mass, policy, value=-1))
        if k + 1 < mdp.horizon:
            arrived = layer.arrive(flows[k])
            visits.append(arrived if aim is None else masses[k + 1] - arrived)
    q, y = join(flows, 2), join(totals[::-1], 1)
    scores = y / weight if varies else y
    if centred:
        firsts = join([total.detach()[..., :1] for total in totals], 1)
        y = y + (firsts.cumsum(-1) - firsts).flip(-1).index_select(-1, mdp.layer)
    return SoftPlan(q, -y if varies else -weight * y, visits, scores, logs)


def _flow_error(q: Tensor, u: Tensor) -> Tensor:
    """Return the largest |sum_a q - u| / u, where u is what arrives; dead states do not count."""
    u, mass = u.detach(), q.detach() @ q.new_ones(q.shape[-1])
    return ((mass - u).abs() / u.clamp(min=math.exp(log_dead(u.dtype)))).amax(-1)


# -- kappa > 0: Newton's method --------------------------------------------------------------------


class Unfolded(NamedTuple):
    """Value, policy and log u that follow from a guess of log u."""

    value: Tensor  # (*batch, S), v
    log_policy: Tensor  # (*batch, S, A), minus infinity on masked pairs
    log_state: Tensor  # (*batch, S), log u


def unfold(
    mdp: LayeredMDP, loss: Tensor, entropy: Entropy, guess: Tensor, centred: bool = False
) -> Unfolded:
    """Run soft value iteration backward and the policy forward, in differentiable operations.

    `centred` as in `plan_softly`, but with the likeliest state of a layer: values of dead states
    may be huge. The value lacks what is subtracted.
    """
    losses, masks, guesses = mdp.split(loss, -2), mdp.split(mdp.actions, -2), mdp.split(guess, -1)
    weight, price = entropy
    values: list[Tensor] = []
    policies: list[Tensor] = []
    for k in reversed(range(mdp.horizon)):
        Q = losses[k] + mdp.layers[k].ahead(values[0]) if values else losses[k]
        # Subtract the minimum so that exp does not overflow; the result does not depend on it.
        least = torch.where(masks[k], Q, torch.inf).amin(-1).detach()
        scores = torch.where(masks[k], (least.unsqueeze(-1) - Q) / weight.unsqueeze(-1), -torch.inf)
        soft = scores.logsumexp(-1)
        policies.insert(0, scores - soft.unsqueeze(-1))
        value = price * (1 + guesses[k]) + least - weight * soft
        if centred:
            likeliest = guesses[k].detach().argmax(-1, keepdim=True)
            value = value - value.detach().take_along_dim(likeliest, -1)
        values.insert(0, value)
    logs = [mdp.initial.log()]
    for layer, policy in zip(mdp.layers[:-1], policies[:-1], strict=True):
        logs.append(layer.arrive_logs(logs[-1].unsqueeze(-1) + policy))
    return Unfolded(join(values, 1), join(policies, 2), join(logs, 1))


def invert_jacobian(mdp: LayeredMDP, entropy: Entropy, at: Unfolded) -> Callable[[Tensor], Tensor]:
    """Return x -> J^-1 x for x `(*batch, S)`, layer by layer; J is a constant of autograd.

    J x = b reads x = b - kappa z with two recursions, m = x + P_pi m backward and
    z' = rho_pi z + C m' forward. They are decoupled by m = n - R z (a Riccati recursion).
    """
    weight, price = entropy.weight.unsqueeze(-1).detach(), entropy.price.detach()
    logs, policies = mdp.split(at.log_state.detach(), -1), mdp.split(at.log_policy.detach(), -2)
    passes: list[tuple[Tensor, Tensor, Tensor]] = []
    eye = torch.eye(mdp.layer_sizes[-1], dtype=weight.dtype, device=weight.device)
    R = price.unsqueeze(-1) * eye
    for k in reversed(range(mdp.horizon - 1)):
        kernel = mdp.layers[k].dense.detach()  # (*batch, n, A, m)
        onward = (policies[k].exp().unsqueeze(-2) @ kernel).squeeze(-2)  # P_pi, (*batch, n, m)
        log_q = logs[k].unsqueeze(-1) + policies[k]
        relative = log_q.unsqueeze(-1) - logs[k + 1][..., None, None, :]
        most = largest_exponent(kernel.dtype)
        sources = kernel * relative.clamp(max=most).exp()  # rho(s, a | s')
        spread = (kernel - onward.unsqueeze(-2)).flatten(-3, -2) / weight
        C = sources.flatten(-3, -2).mT @ spread  # (*batch, m, m)
        inverse = torch.linalg.inv_ex(eye + C @ R).inverse
        forth, turn = inverse @ sources.sum(-2).mT, inverse @ C  # z' = forth z + turn n'
        passes.insert(0, (onward @ (eye - R @ turn), forth, turn))
        eye = torch.eye(mdp.layer_sizes[k], dtype=weight.dtype, device=weight.device)
        R = price.unsqueeze(-1) * eye + onward @ (R @ forth)

    def solve(b: Tensor) -> Tensor:
        n = list(mdp.split(b, -1))
        for k in reversed(range(mdp.horizon - 1)):
            n[k] = n[k] + matvec(passes[k][0], n[k + 1])
        z = [torch.zeros_like(n[0])]
        for k, (_, forth, turn) in enumerate(passes):
            z.append(matvec(forth, z[-1]) + matvec(turn, n[k + 1]))
        return b - price * join(z, 1)

    return solve


def occupancy_of(mdp: LayeredMDP, log_policy: Tensor) -> Tensor:
    """Return q of the policy, `(*batch, S, A)`, zero where it underflows."""
    policy = log_policy.exp()
    return flow_of(mdp).forward(policy, flow_source(mdp)).unsqueeze(-1) * policy


def log_dead(dtype: torch.dtype) -> float:
    """Return the logarithm below which a state is dead: its q may underflow."""
    # The same share of the range of exponents in every number type.
    share = math.log(torch.finfo(dtype).tiny) / math.log(torch.finfo(torch.float64).tiny)
    return LOG_DEAD * share


def settle(
    mdp: LayeredMDP, shaped: Shaped, entropy: Entropy, guess: Tensor, options: Options
) -> tuple[Tensor, Solution]:
    """Solve log u(g) = g from a guess `(*batch, S)`, for plain tensors; in stages if kappa > w.

    Return g, and the solution; its `value` belongs to the shaped loss.
    """
    weight, price = entropy
    ratio = torch.full_like(price, 0.5)
    level = before = torch.maximum(weight, price)
    ended = (price <= weight).all(-1)
    problem, tolerance = (mdp, shaped), options.tolerance_in(guess.dtype)
    most = torch.full_like(ended, options.max_steps, dtype=torch.long)
    found, solution = _iterate(*problem, Entropy(level, price), guess, tolerance, most, ended)
    older, guess = guess, found
    for _ in range(STAGES):
        active = ~ended & (ratio < 0.999).all(-1)
        if not bool(active.any()):
            break
        lower = torch.maximum(weight, level * ratio)
        last = (lower <= weight).all(-1)
        slope = torch.where(level == before, 0.0, (lower - level) / (level - before))
        ahead = guess + slope * (guess - older)
        most = (STAGE_STEPS + STALL_AFTER * last).clamp(max=options.max_steps) * active
        there, now = _iterate(*problem, Entropy(lower, price), ahead, tolerance, most, last)
        good = active & ((now.status == Status.CONVERGED) | (now.status == Status.STALLED))
        ratio = torch.where(over(good, 1), ratio, ratio.sqrt())
        ratio = torch.where(over(good & (now.steps <= 3), 1), ratio**1.5, ratio)
        now.certificate[..., 1] += solution.certificate[..., 1]
        solution, (found,) = solution.merge(now, active), merge(active, [there], [found])
        ended = ended | (good & last)
        reached = guess, there, level, lower
        older, guess, before, level = merge(good, reached, (older, guess, before, level))
    # Where the stages ran out, the solution may belong to a larger w.
    solution.certificate[..., 0].masked_fill_(~ended, float(Status.MAX_STEPS))
    return found, solution


#: How often w is lowered, if kappa > w, and the largest number of Newton steps each time.
STAGES, STAGE_STEPS = 40, 8


def _iterate(
    mdp: LayeredMDP,
    shaped: Shaped,
    entropy: Entropy,
    guess: Tensor,
    tolerance: float,
    most: Tensor,
    precise: Tensor,
) -> tuple[Tensor, Solution]:
    """Newton's method for log u(g) = g, with at most this number of steps, `(*batch,)`.

    It stops at a relative change of 0.1 unless `precise`, `(*batch,)`.
    """
    loss, eps = shaped.gaps, torch.finfo(guess.dtype).eps
    enough, centred = torch.where(precise, eps**0.5, 0.1), conserves_mass(mdp)
    # How much log q changes with g, at least.
    share = (entropy.price / entropy.weight).squeeze(-1)
    status = torch.full(guess.shape[:-1], Status.MAX_STEPS, device=guess.device)
    steps, patience = torch.zeros_like(status), torch.full_like(status, STALL_AFTER)
    best, decrement = torch.full_like(share, torch.inf), torch.zeros_like(share)
    running, count = most > 0, 0
    step, length, before, moved = guess, torch.ones_like(best), best, best
    while True:
        found = unfold(mdp, loss, entropy, guess, centred)
        off = found.log_state - guess
        # The unit of errors of log u: 1, and in dead states the size of log u.
        unit = (found.log_state / log_dead(guess.dtype)).clamp(min=1.0)
        error = invert_jacobian(mdp, entropy, found)(off)
        if not bool(running.any()):
            break
        size = (off / unit).square().sum(-1)
        back = (count > FULL_STEPS) & (moved > 0.1) & (length > 0.1) & ~(size < before)
        length = torch.where(back, length / 2, 1.0)
        before, step = merge(back, (before, step), (size, error))
        moved = torch.where(back, 1.0, share.clamp(min=1) * (error / unit).abs().amax(-1))
        status = torch.where(running & ~moved.isfinite(), Status.NOT_FINITE, status)
        running = running & moved.isfinite()
        ahead = guess + over(torch.where(back, -length, 1.0), 1) * step
        guess = torch.where(running.unsqueeze(-1), ahead, guess)
        squared = (entropy.price * off * (off - error) * found.log_state.exp()).sum(-1)
        decrement = torch.where(running, squared, decrement)
        steps += running
        patience = torch.where((moved < 0.5 * best) | (moved > 0.1), STALL_AFTER, patience - 1)
        best = torch.minimum(best, moved)
        done = running & ((moved <= enough) | (patience == 0))
        status = torch.where(done, Status.STALLED, status)  # until certified below
        running, count = running & ~done & (steps < most), count + 1

    q, flow_on = occupancy_of(mdp, found.log_policy), flow_of(mdp)
    policy = found.log_policy.exp()
    bent = flow_on.lookahead(flow_on.backward(policy, entropy.price * error))
    bent = (bent - (policy * bent).sum(-1, True)) / over(entropy.weight, 1) + over(off - error, 1)
    noise = eps / 2 * flow_on.lookahead(entropy.price * guess.abs())
    bent, noise = (torch.where(q > torch.finfo(q.dtype).tiny, x, 0.0) for x in (bent, noise))
    bent = torch.where(over(entropy.price > entropy.weight, 1), 0.0, bent)
    shaped = shaped._replace(rounding=shaped.rounding + noise)
    dual = torch.maximum(share * (error / unit).abs().amax(-1), bent.abs().amax((-2, -1)))
    dual = torch.maximum(dual, rounding_error(shaped, q, entropy.weight))
    flow = _flow_error(q, flow_on.inflow(q) + flow_source(mdp))
    certified = (dual <= tolerance) & (flow <= tolerance) & q.isfinite().all(-1).all(-1)
    status = torch.where((status == Status.STALLED) & certified, Status.CONVERGED, status)
    numbers = (status.to(q), steps.to(q), decrement.clamp(min=0).sqrt(), flow, dual)
    value = unfold(mdp, loss, entropy, guess).value if centred else found.value
    return guess, Solution(q, value, torch.stack(numbers, -1))


def rounding_error(shaped: Shaped, q: Tensor, weight: Tensor) -> Tensor:
    """Return the relative error of q from rounding in the shaped loss, `(*batch,)`."""
    state, smallest = q.sum(-1, keepdim=True), torch.finfo(q.dtype).tiny / torch.finfo(q.dtype).eps
    error = spread_errors(shaped.rounding.expand_as(q), q / state)
    # Rounding may hide that a gap is small, and q positive.
    close = shaped.gaps - shaped.rounding < OPEN * weight.unsqueeze(-1)
    visible = (q > smallest) | (close & (state > smallest))
    return (torch.where(visible, error, 0.0).amax(-1) / weight).amax(-1)


# -- As an equation of torch_occ.step.implicit -----------------------------------------------------


@dataclass(frozen=True)
class Entropic:
    """The step; tensors `(loss, start, w, kappa, t, *probabilities)`.

    Args:
        probabilities: whether derivatives with respect to them may be taken.
        closed: whether kappa is zero for all parameters, so that nothing depends on the guess.
        check: as in `torch_occ.step.implicit.Stationarity`.
        centred: whether derivatives may be `centred`; see `plan_softly`.
    """

    mdp: LayeredMDP
    options: Options
    probabilities: bool
    closed: bool
    check: bool | None
    centred: bool

    @property
    def events(self) -> tuple[int, ...]:
        return (2, 2, 1, 1, 0, *(event_dims_of(self.mdp) if self.probabilities else ()))

    def validate(
        self, mdp: LayeredMDP, loss: Tensor, start: Tensor, weight: Tensor, t: Tensor
    ) -> None:
        """Check values; runs on plain tensors, inside every transform."""
        if self.check is None:
            return
        if self.probabilities:
            check_probabilities(mdp)
        check_values(mdp, loss, start, t, zeros=True)
        if not bool((weight > 0).all() and weight.isfinite().all()):
            raise ValueError(
                "regularizer: its weight is not a positive number; check its parameters"
            )

    def plan(self, *tensors: Tensor, aim: Tensor | None = None) -> tuple[SoftPlan, Tensor] | None:
        """Return `plan_softly` with this aim, not shaped, and its rounding error; None if large."""
        loss, start, weight, _, t, *_ = tensors
        mdp, eps = self.mdp, torch.finfo(loss.dtype).eps
        tolerance = self.options.tolerance_in(loss.dtype)
        coarse = min(tolerance / 4, max(tolerance / 200, 50 * eps))
        # Numbers that are fine are recognized by their extremes, which takes less time.
        (low, high), (small, large) = map(_range, (keep("pair", mdp, loss, 0.0), weight))
        most = mdp.horizon * (max(-low, high) / small + math.log(mdp.num_actions)) if small else 0
        fine = math.isfinite(most) and 0 < small <= large < math.inf and not self.probabilities
        first, last = _range(t) if t.numel() else (1.0, 1.0)
        if not (fine and _range(start)[0] >= 0 and 1 <= first <= last < math.inf):
            self.validate(mdp, loss.detach(), start, weight.detach(), t.detach())
        loss = loss.expand(*_batch_of(mdp, tensors), *loss.shape[-2:])
        plan = plan_softly(mdp, loss, weight, self.centred and not eps * most <= coarse, aim)
        rounding = plan.rounding()
        return (plan, rounding) if bool((rounding <= coarse).all()) else None

    def solve(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return q, v, the certificate; g, and the gaps and potential of the shaped loss."""
        loss, start, weight, price, t, *probabilities = tensors
        mdp = self.mdp.with_probabilities(*probabilities) if probabilities else self.mdp
        self.validate(mdp, loss, start, weight, t)
        batch = _batch_of(mdp, tensors)
        entropy = Entropy(weight.expand(*batch, -1), price.expand(*batch, 1))
        shaped = shape_finely(mdp, loss.expand(*batch, *loss.shape[-2:]))
        guess = start.sum(-1).clamp(min=torch.finfo(loss.dtype).tiny).log()
        guess = guess.expand_as(shaped.value)
        if self.closed:
            plan = plan_softly(mdp, shaped.gaps, entropy.weight)
            error = plan.rounding() + rounding_error(shaped, plan.q, entropy.weight)
            solution = plan.certify(error)
            good = solution.certificate[..., 3:].amax(-1) <= self.options.tolerance_in(loss.dtype)
            solution.certificate[..., 0] = torch.where(good, Status.CONVERGED, Status.STALLED)
        else:
            guess, solution = settle(mdp, shaped, entropy, guess, self.options)
        shift = shaped.value + potential(mdp, shaped.constants)
        solution = solution._replace(value=solution.value + shift)
        report(bool(self.check), solution)
        return *solution[:3], guess, shaped.gaps, shift

    def _replay(self, outputs: Sequence[Tensor], moving: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return (q, v) as a function of loss, w, kappa and the probabilities."""
        (loss, weight, price, *probabilities), (*_, guess, gaps, shift) = moving, outputs
        mdp = self.mdp.with_probabilities(*probabilities) if probabilities else self.mdp
        # The value is that of the gaps; the derivative is that of loss + P shift - shift.
        change = loss + flow_of(mdp).lookahead(shift)
        shaped = gaps + (change - change.detach())  # may be infinite where an element failed
        shaped = torch.where(mdp.actions & shaped.isfinite(), shaped, 0.0)
        if self.closed:
            plan = plan_softly(mdp, shaped, weight)
            return plan.q, plan.value + shift
        entropy = Entropy(weight, price)
        at = unfold(mdp, shaped, entropy, guess, self.centred)
        solve = invert_jacobian(mdp, entropy, at)
        for _ in range(3):  # each makes one more derivative right
            guess = guess + solve(at.log_state - guess)
            at = unfold(mdp, shaped, entropy, guess, self.centred)
        return occupancy_of(mdp, at.log_policy), at.value + shift

    def pull_back(
        self,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        z_bar: Sequence[Tensor],
        more: bool,
    ) -> Sequence[Tensor]:
        """Return derivatives with respect to the tensors, zero for the start and t."""
        loss, start, weight, price, t, *rest = tensors
        moving = (loss, weight, price, *rest)
        _, pull, *_ = torch.func.vjp(lambda *given: self._replay(outputs, given), *moving)
        loss_bar, weight_bar, price_bar, *bars = pull(tuple(z_bar))
        zeros = torch.zeros_like(start), torch.zeros_like(t)
        return loss_bar, zeros[0], weight_bar, price_bar, zeros[1], *bars

    def push(
        self, tensors: Sequence[Tensor], outputs: Sequence[Tensor], tangents: Sequence[Any]
    ) -> Sequence[Tensor]:
        """Return the tangents of q and v."""
        moving, dots = ((x[0], *x[2:4], *x[5:]) for x in (tensors, tangents))
        return poison(
            outputs, push_forward(lambda *given: self._replay(outputs, given), moving, dots)
        )


def _batch_of(mdp: LayeredMDP, tensors: Sequence[Tensor]) -> torch.Size:
    """Return the batch shape; that of t and of the start counts although nothing depends on it."""
    loss, start, weight, price, t, *_ = tensors
    tables = loss.shape[:-2], start.shape[:-2], weight.shape[:-1], price.shape[:-1]
    return broadcast(*tables, t.shape, mdp.batch_shape)


def _range(x: Tensor) -> tuple[float, float]:
    least, most = torch.aminmax(x.detach()) if x.numel() else (0.0, 0.0)
    return float(least), float(most)


def poison(outputs: Sequence[Tensor], z: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Set z to NaN for elements that failed: their derivatives would be silently wrong.

    Elements on which nothing depends, with z = 0, stay: others share their parameters.
    """
    if len(outputs) == 2:
        return z[0], z[1]
    asked = (z[0] != 0).any(-1).any(-1) | (z[1] != 0).any(-1)
    failed = (outputs[2][..., 0] != Status.CONVERGED) & asked
    x = torch.where(failed[..., None, None], torch.nan, z[0])
    return x, torch.where(failed[..., None], torch.nan, z[1])


def push_forward(
    function: Callable[..., tuple[Tensor, Tensor]],
    at: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Return the derivative along tangents, by two reverse passes; forward mode does not nest."""
    (y0, y1), pull_back, *_ = torch.func.vjp(function, *at)

    def paired(cotangents: tuple[Tensor, Tensor]) -> Tensor:
        pairs = zip(pull_back(cotangents), tangents, strict=True)
        terms = ((g * tangent).sum() for g, tangent in pairs if tangent is not None)
        return sum(terms, y0.new_zeros(()))

    return torch.func.grad(paired)((torch.zeros_like(y0), torch.zeros_like(y1)))
