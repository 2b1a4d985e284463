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
from typing import Any, Literal, NamedTuple

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
YEAR = 365 * 86400.0
Row = dict[str, Any]


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


class Answer(NamedTuple):
    """The result of an estimator at one T."""

    gradient: Tensor  # (P,)
    error: Tensor  # (P,)
    heaviest: Tensor  # (P,), the share of one seed in the variance over all
    seconds: float  # of one core


def summarize(samples: Tensor, took: float) -> Answer:
    """The mean of one sample per seed, `(N, P)`, and its standard error."""
    mean = samples.mean(0)
    squares = (samples - mean).square()
    error = samples.std(0) / len(samples) ** 0.5
    return Answer(mean, error, squares.amax(0) / squares.sum(0), took)


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


def estimate(
    args: Args, mdp: occ.LayeredMDP, mean: Tensor, beta: float, T: int
) -> tuple[dict[str, Answer], list[str], int]:
    """All estimators at one setting and one T.

    Returns the answers, the names of the parameters, and the number of seeds.
    """
    psi = occ.jin_luo(mdp, beta=beta, gamma=args.gamma)
    count = max(2, min(args.seeds, args.budget // T))
    clock = [time.process_time()]  # processor time, since the machine may be busy
    pathwise, unbiased = run_gradients(mdp, psi, mean, T, count, args.seed + 1)
    clock.append(time.process_time())
    reference = differences(mdp, psi, mean, T, count, args.step)
    clock.append(time.process_time())
    predicted = forecast_gradient(mdp, psi, mean, T)
    clock.append(time.process_time())
    took, nothing = np.diff(clock).tolist(), torch.zeros_like(predicted)
    answers = {
        REFERENCE: summarize(reference, took[1]),
        PATHWISE: summarize(pathwise, took[0]),
        UNBIASED: summarize(unbiased, took[0]),
        FORECAST: Answer(predicted, nothing, nothing, took[2]),
    }
    return answers, list(values_of(psi)), count


def rows_of(
    answers: dict[str, Answer], names: list[str], beta: float, T: int, count: int
) -> list[Row]:
    """One row per estimator and parameter, with its bias and its cost."""
    reference, rows = answers[REFERENCE], []
    for estimator, answer in answers.items():
        for i, name in enumerate(names):
            truth, own = float(reference.gradient[i]), float(answer.gradient[i])
            error, theirs = float(answer.error[i]), float(reference.error[i])
            apart = 0.0 if estimator == REFERENCE else abs(own - truth) / math.hypot(error, theirs)
            # A standard error falls with the square root of the seeds.
            more = max((error / (0.1 * abs(truth))) ** 2, 1 / max(count, 1))
            row: Row = {"beta": beta, "episodes": T, "estimator": estimator, "parameter": name}
            row |= {"seeds": 0 if estimator == FORECAST else count}
            row |= {"gradient": own, "standard_error": error}
            row |= {"reference": truth, "reference_error": theirs}
            row |= {"relative_bias": own / truth - 1, "distance": apart}
            row |= {"heaviest_seed": float(answer.heaviest[i]), "seconds": answer.seconds}
            rows.append(row | {"seconds_to_10_percent": answer.seconds * more})
    return rows


def grouped(rows: list[Row]) -> dict[tuple[float, int, str], dict[str, Row]]:
    """The rows of all parameters, by setting, T and estimator."""
    found: dict[tuple[float, int, str], dict[str, Row]] = {}
    for row in rows:
        key = (row["beta"], row["episodes"], row["estimator"])
        found.setdefault(key, {})[row["parameter"]] = row
    return found


def verdicts(rows: list[Row], shown: str) -> list[str]:
    """Which estimators are usable; only the numbers decide."""
    lines = []
    for (beta, T, estimator), kept in grouped(rows).items():
        own, apart = kept[shown], max(row["distance"] for row in kept.values())
        noise = own["standard_error"] / abs(own["reference"])
        if not np.isfinite(apart):
            note = "not a number"
        elif noise > 1:
            note = f"not usable, its standard error is {noise:.3g} times the gradient"
        elif apart > 3:
            note = f"biased, by {own['relative_bias']:+.1%}"
            note += f"; up to {apart:.1f} standard errors away from the differences"
        else:
            note = f"within three standard errors of the differences (up to {apart:.1f})"
            note += f"; its own is {noise:.1%} of the gradient" if own["seeds"] else ""
        if own["heaviest_seed"] > 0.25:
            note += f"; one seed makes {own['heaviest_seed']:.0%} of its variance"
        if estimator != REFERENCE:
            lines.append(f"beta = {beta:g}, T = {T}, {estimator}: {note}")
    return lines


def tabulate(rows: list[Row], shown: str) -> str:
    """A row for every setting, T and estimator."""
    cells = []
    for (beta, T, estimator), kept in grouped(rows).items():
        own, line = kept[shown], [f"{beta:g}", str(T), estimator]
        line.append(str(own["seeds"] or ""))
        for row in kept.values():
            error = f" ± {row['standard_error']:.2g}" if own["seeds"] else ""
            line.append(f"{row['gradient']:.4g}{error}")
        price = own["seconds_to_10_percent"]
        needed = common.seconds(price) if price < YEAR else "> a year"
        cells.append([*line, common.seconds(own["seconds"]), needed if own["seeds"] else ""])
    header = ["beta", "T", "estimator", "seeds", *(f"d / d log {name}" for name in kept)]
    return common.table([*header, "core time", f"for 10 % in {shown}"], cells, left=(2,))


STYLES = {
    REFERENCE: (COLOURS[6], "-", "o"),
    PATHWISE: (COLOURS[1], "--", "s"),
    UNBIASED: (COLOURS[0], "-", "D"),
    FORECAST: (COLOURS[2], ":", "^"),
}


def draw(rows: list[Row], shown: str) -> Figure:
    """One column per setting: the gradient over its reference, and the error with 1,000 seeds."""
    rows, low, high = [row for row in rows if row["parameter"] == shown], -1.0, 4.0
    betas = list(dict.fromkeys(row["beta"] for row in rows))
    figure = common.new_figure(3.4 * len(betas) + 0.8, 6.2)
    grid = figure.subplots(2, len(betas), squeeze=False, sharex=True, sharey="row")
    for beta, (above, below) in zip(betas, grid.T, strict=True):
        for i, (estimator, (colour, style, marker)) in enumerate(STYLES.items()):
            kept = [row for row in rows if row["beta"] == beta and row["estimator"] == estimator]
            t, unit, gradient, error, seeds = (
                np.array([row[key] for row in kept], dtype=float)
                for key in ("episodes", "reference", "gradient", "standard_error", "seeds")
            )
            values, errors, beside = gradient / unit, error / abs(unit), t * 1.08 ** (i - 1.5)
            look = {"color": colour, "linestyle": style, "linewidth": 1.3, "label": estimator}
            look |= {"marker": marker, "markersize": 4}
            pale = look | {"linestyle": "none", "alpha": 0.3, "label": None}
            for use, how in ((errors < 1, look), (errors >= 1, pale)):  # noise is not connected
                bars = {"yerr": 1.96 * errors[use], "elinewidth": 1, "capsize": 2.5}
                above.errorbar(beside[use], values[use], **bars, **how)
            for edge, outside in ((low, values < low), (high, values > high)):  # arrows
                mark = {"marker": "v" if edge < 0 else "^", "linestyle": "none", "color": colour}
                arrows = above.plot(beside[outside], edge + 0 * t[outside], clip_on=False, **mark)
                arrows[0].set_in_layout(False)
            if estimator != FORECAST:
                below.plot(t, errors * np.sqrt(seeds / 1000), **look)
        above.axhline(1, color="0.75", linewidth=0.8, zorder=0)
        common.tidy(above, title=f"β = {beta:g}", ylim=(low, high))
        below.axhspan(1, 1e30, color="0.94", zorder=0, linewidth=0)
        common.tidy(below, xscale="log", yscale="log", xlabel="episodes T", ylim=(1e-3, 1e8))
    grid[0, 0].set_ylabel("estimate / reference (95 %)")
    grid[1, 0].set_ylabel("standard error of 1,000 seeds / |gradient|\n(grey: larger than 1)")
    common.legend_below(figure, grid[0, 0])
    figure.suptitle(f"The gradient of the regret in log {shown}, through the run")
    return figure


def main(args: Args) -> Path:
    """Estimate, compare, draw."""
    directory = common.begin("meta_gradients", args, args.seed)
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.actions, seed=args.seed)
    mean = common.random_means(mdp, args.seed)
    estimate(replace(args, seeds=2), mdp, mean, 1.0, 1)  # compiled before anything is timed
    rows: list[Row] = []
    for beta in args.betas:
        for T in args.episodes:
            answers, names, count = estimate(args, mdp, mean, beta, T)
            rows += rows_of(answers, names, beta, T, count)
            spent = common.seconds(sum(answer.seconds for answer in answers.values()))
            print(f"beta = {beta:g}, T = {T}: {count} seeds, {spent}", flush=True)
            common.write_csv(directory / "gradients.csv", rows)
    common.write_figure(directory / "gradients.png", draw(rows, args.shown))
    text = "\n".join(
        [tabulate(rows, args.shown), "", *verdicts(rows, args.shown), "", common.machine()]
    )
    common.write_text(directory / "report.txt", text)
    print(f"\n{text}\n\nwritten to {directory}: gradients.png, gradients.csv, report.txt")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
