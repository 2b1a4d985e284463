"""Gradients of the regret through the run: bias, standard error and cost of each estimator over T.

The reference is a central difference of simulated regret with common random numbers, on seeds of
its own. The pathwise estimator holds the sampled actions fixed and is biased. Adding the score
makes it unbiased. The errors of both explode with T, the sooner the less the learner is
regularized. The gradient of the forecast is shown beside them. The script says where each stops
being usable.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import COLOURS

REFERENCE, PATHWISE = "finite differences", "pathwise"
UNBIASED, FORECAST = "pathwise + score", "forecast"


@dataclass(frozen=True)
class Args:
    """Which runs are differentiated."""

    episodes: tuple[int, ...] = (30, 100, 300, 1000)
    """T, each with runs of its own"""
    betas: tuple[float, ...] = (192.0, 10.0, 1.0)
    """log-barrier; the paper's is 64 L"""
    budget: int = 30_000
    """episodes to play for each T by each estimator, from which the number of seeds follows"""
    seeds: int = 300
    """the largest number of seeds"""
    step: float = 0.1
    """of the differences, in the logarithm of a parameter"""
    seed: int = 0
    """of the MDP and the losses"""
    horizon: int = 3
    """L"""
    width: int = 3
    """states in each layer but the first"""
    actions: int = 3
    """A"""
    gamma: float = 1.0
    """eta_t = gamma / sqrt(t)"""
    shown: Literal["alpha", "beta", "gamma"] = "gamma"
    """the parameter that is drawn and that decides whether an estimator is usable"""
    root: Path = Path("runs")
    """where the run's directory goes"""


class Row(NamedTuple):
    """The result of an estimator at one setting and one T."""

    beta: float
    episodes: int
    estimator: str
    seeds: int
    gradient: Tensor  # (P,)
    error: Tensor  # (P,), its standard error
    seconds: float  # of one core

    def verdict(self, reference: Row, shown: int) -> str:
        """Whether it is usable; only the numbers decide."""
        noise = float(self.error[shown] / reference.gradient[shown].abs())
        distance = (self.gradient - reference.gradient) / self.error.hypot(reference.error)
        bias = float(self.gradient[shown] / reference.gradient[shown] - 1)
        if self is reference:
            return "the reference"
        if noise > 1 or not math.isfinite(noise):
            return f"not usable: its standard error is {noise:.3g} times the gradient"
        apart = f"{float(distance.abs().max()):.1f} standard errors from the reference"
        return f"biased, by {bias:+.1%}; {apart}" if distance.abs().max() > 3 else apart


def values_of(psi: occ.Regularizer) -> dict[str, Tensor]:
    """The parameters by their short names: alpha, gamma, beta."""
    return {name.rpartition(".")[2]: p.detach() for name, p in psi.named_parameters()}


def draw_index(shares: Tensor, generator: torch.Generator) -> Tensor:
    """One index for each row of `(N, K)`, `(N, 1)`."""
    return torch.multinomial(shares.detach(), 1, generator=generator)


def run_gradients(
    mdp: occ.LayeredMDP, psi: occ.Regularizer, mean: Tensor, T: int, count: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Play importance-weighted FTRL with Bernoulli losses, and differentiate through the run.

    Every run has parameters of its own, so that one reverse pass gives the gradients of all. The
    loss estimate of a visited pair is loss / q, and the next q depends on it.

    Returns the pathwise and the unbiased gradients in the logarithms of the parameters,
    `(count, P)` each.
    """
    own = {name: value.repeat(count) for name, value in values_of(psi).items()}
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, **own))
    parameters = list(step.parameters())
    generator = torch.Generator().manual_seed(seed)
    gaps = occ.optimal_policy(mdp, mean).gaps
    total = torch.zeros(count, *mean.shape, dtype=mean.dtype)
    log_likelihood, scored = total[:, 0, 0], total[:, 0, 0]
    regret, q = total[:, 0, 0], None
    for t in range(1, T + 1):
        q = step(total, float(t), warm_start=None if q is None else q.detach())
        cost = (q * gaps).sum((-2, -1))
        # The regret of this episode also depends on all the actions before it.
        baseline = (cost.sum() - cost) / (count - 1)
        scored = scored + (cost - baseline).detach() * log_likelihood
        regret = regret + cost
        pairs, chances = walk(mdp, q, generator)
        log_likelihood = log_likelihood + chances.log().sum(-1)
        loss = torch.bernoulli(mean.flatten()[pairs], generator=generator)
        estimates = loss / q.flatten(1).gather(1, pairs)
        total = (total.flatten(1).scatter_add(1, pairs, estimates)).view_as(total)

    def slopes(of: Tensor) -> Tensor:
        found = torch.autograd.grad(of.sum(), parameters, retain_graph=True, allow_unused=True)
        columns = [
            torch.zeros_like(p) if g is None else (g * p).detach()
            for g, p in zip(found, parameters, strict=True)
        ]
        return torch.stack(columns, -1)

    pathwise = slopes(regret)
    return pathwise, pathwise + (slopes(scored) if T > 1 else 0.0)


def walk(mdp: occ.LayeredMDP, q: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One trajectory per run: the visited pairs and the probabilities of their actions, `(N, L)`.

    The probabilities are differentiable in q.
    """
    pairs, chances, rows = [], [], torch.arange(len(q))
    state = draw_index(mdp.initial.expand(len(q), -1), generator)[:, 0]
    for k, here in enumerate(mdp.layer_slices):
        policy = q[rows, state] / q[rows, state].sum(-1, keepdim=True)
        action = draw_index(policy, generator)
        pairs.append(state * mdp.num_actions + action[:, 0])
        chances.append(policy.gather(1, action)[:, 0])
        if k + 1 < mdp.horizon:
            successors = mdp.transitions[k][state - here.start, action[:, 0]]
            state = mdp.layer_slices[k + 1].start + draw_index(successors, generator)[:, 0]
    return torch.stack(pairs, -1), torch.stack(chances, -1)


def differences(
    mdp: occ.LayeredMDP, psi: occ.Regularizer, mean: Tensor, T: int, count: int, step: float
) -> Tensor:
    """Central differences of simulated regret with common random numbers, `(count, P)`."""
    losses, seeds = occ.BernoulliLosses(mean), range(1, count + 1)
    values, columns = values_of(psi), []
    for name, value in values.items():
        sides = []
        for sign in (1, -1):
            moved = values | {name: value * math.exp(sign * step)}
            learner = occ.FTRL(mdp, occ.jin_luo(mdp, **moved))
            sides.append(common.final_regret(learner, losses, T, seeds))
        columns.append((sides[0] - sides[1]) / (2 * step))
    return torch.stack(columns, -1)


def forecast_gradient(
    mdp: occ.LayeredMDP, psi: occ.Regularizer, mean: Tensor, episodes: int
) -> Tensor:
    """The gradient of the forecast in the logarithms of the parameters."""
    parameters = list(psi.parameters())
    found = torch.autograd.grad(occ.forecast(mdp, psi, mean, episodes).final, parameters)
    return torch.stack([g * p.detach() for g, p in zip(found, parameters, strict=True)])


def estimate(args: Args, mdp: occ.LayeredMDP, mean: Tensor, beta: float, T: int) -> list[Row]:
    """All estimators at one setting and one T; the reference is the first."""
    psi = occ.jin_luo(mdp, beta=beta, gamma=args.gamma)
    count = max(2, min(args.seeds, args.budget // T))
    clock = [time.process_time()]  # processor time, since the machine may be busy
    pathwise, unbiased = run_gradients(mdp, psi, mean, T, count, args.seed + 1)
    clock.append(time.process_time())
    reference = differences(mdp, psi, mean, T, count, args.step)
    clock.append(time.process_time())
    predicted = forecast_gradient(mdp, psi, mean, T)
    clock.append(time.process_time())
    through, apart, forecast = np.diff(clock).tolist()
    samples = {REFERENCE: (reference, apart), PATHWISE: (pathwise, through)}
    rows = [
        Row(beta, T, name, count, x.mean(0), x.std(0) / count**0.5, took)
        for name, (x, took) in (samples | {UNBIASED: (unbiased, through)}).items()
    ]
    return [*rows, Row(beta, T, FORECAST, 0, predicted, torch.zeros_like(predicted), forecast)]


STYLES = {
    REFERENCE: (COLOURS[6], "-", "o"),
    PATHWISE: (COLOURS[1], "--", "s"),
    UNBIASED: (COLOURS[0], "-", "D"),
    FORECAST: (COLOURS[2], ":", "^"),
}


def draw(groups: list[list[Row]], shown: int, name: str) -> Figure:
    """One column per setting: the gradient over its reference, and the error with 1,000 seeds."""
    low, high = -1.0, 4.0
    betas = list(dict.fromkeys(group[0].beta for group in groups))
    figure = common.new_figure(3.4 * len(betas) + 0.8, 6.2)
    grid = figure.subplots(2, len(betas), squeeze=False, sharex=True, sharey="row")
    for beta, (above, below) in zip(betas, grid.T, strict=True):
        mine = [group for group in groups if group[0].beta == beta]
        t = np.array([group[0].episodes for group in mine])
        unit = np.array([float(group[0].gradient[shown]) for group in mine])
        for i, (estimator, (colour, style, marker)) in enumerate(STYLES.items()):
            values = np.array([float(group[i].gradient[shown]) for group in mine]) / unit
            errors = np.array([float(group[i].error[shown]) for group in mine]) / abs(unit)
            look = {"color": colour, "linestyle": style, "linewidth": 1.3, "label": estimator}
            look |= {"marker": marker, "markersize": 4}
            # Values beyond the axes are drawn at their edges.
            shifted, inside = t * 1.08 ** (i - 1.5), np.clip(values, low, high)
            above.errorbar(shifted, inside, 1.96 * np.where(errors < 1, errors, 0), **look)
            if estimator != FORECAST:
                seeds = np.array([group[i].seeds for group in mine])
                below.plot(t, errors * np.sqrt(seeds / 1000), **look)
        above.axhline(1, color="0.75", linewidth=0.8, zorder=0)
        common.tidy(above, title=f"β = {beta:g}", ylim=(low - 0.1, high + 0.1))
        below.axhspan(1, 1e30, color="0.94", zorder=0, linewidth=0)
        common.tidy(below, xscale="log", yscale="log", xlabel="episodes T", ylim=(1e-3, 1e8))
    grid[0, 0].set_ylabel("estimate / reference (95 %)")
    grid[1, 0].set_ylabel("standard error of 1,000 seeds / |gradient|\n(grey: larger than 1)")
    common.legend_below(figure, grid[0, 0])
    figure.suptitle(f"The gradient of the regret in log {name}, through the run")
    return figure


def main(args: Args) -> Path:
    """Estimate, compare, draw."""
    directory = common.begin("meta_gradients", args, args.seed)
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.actions, seed=args.seed)
    mean, names = common.random_means(mdp, args.seed), list(values_of(occ.jin_luo(mdp)))
    shown = names.index(args.shown)
    estimate(replace(args, seeds=2), mdp, mean, 1.0, 1)  # compiled before anything is timed
    groups, cells = list[list[Row]](), []
    for beta in args.betas:
        for T in args.episodes:
            groups.append(found := estimate(args, mdp, mean, beta, T))
            for row in found:
                line = [f"{beta:g}", str(T), row.estimator, str(row.seeds or "")]
                pairs = zip(row.gradient.tolist(), row.error.tolist(), strict=True)
                line += [f"{x:.4g}" + (f" ± {e:.2g}" if row.seeds else "") for x, e in pairs]
                line += [common.seconds(row.seconds), row.verdict(found[0], shown)]
                cells.append(line)
            print(f"beta = {beta:g}, T = {T}: {found[0].seeds} seeds", flush=True)
    header = ["beta", "T", "estimator", "seeds", *(f"d / d log {name}" for name in names)]
    header += ["core time", f"in {args.shown}"]
    rows = [dict(zip(header, line, strict=True)) for line in cells]
    common.write_csv(directory / "gradients.csv", rows)
    common.write_figure(directory / "gradients.png", draw(groups, shown, args.shown))
    text = f"{common.table(header, cells, left=(2, 8))}\n\n{common.machine()}"
    common.write_text(directory / "report.txt", text)
    print(f"\n{text}\n\nwritten to {directory}: gradients.png, gradients.csv, report.txt")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
