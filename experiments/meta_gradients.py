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
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro
from torch import Tensor

import torch_occ as occ
from experiments.common import machine, run_directory, seconds, table, write_csv, write_figure
from experiments.games import write_configuration, write_text

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
    shown: str = "gamma"
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
            sides.append(occ.simulate(mdp, learner, losses, T, seeds).regret[:, -1])
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
) -> list[dict[str, Any]]:
    """One row per estimator and parameter, with its distance from the differences."""
    reference, rows = answers[REFERENCE], []
    for estimator, answer in answers.items():
        for i, name in enumerate(names):
            truth, own = float(reference.gradient[i]), float(answer.gradient[i])
            error, theirs = float(answer.error[i]), float(reference.error[i])
            apart = abs(own - truth) / math.hypot(error, theirs)
            rows.append(
                {
                    "beta": beta,
                    "episodes": T,
                    "estimator": estimator,
                    "parameter": name,
                    "seeds": 0 if estimator == FORECAST else count,
                    "gradient": own,
                    "standard_error": error,
                    "reference": truth,
                    "distance": 0.0 if estimator == REFERENCE else apart,
                    "heaviest_seed": float(answer.heaviest[i]),
                    "seconds": answer.seconds,
                }
            )
    return rows


def verdict(row: dict[str, Any]) -> str:
    """Whether an estimate is usable; only the numbers decide."""
    noise, apart = row["standard_error"] / abs(row["reference"]), row["distance"]
    if not np.isfinite(apart):
        note = "not a number"
    elif noise > 1:
        note = f"not usable, its standard error is {noise:.3g} times the gradient"
    elif apart > 3:
        bias = row["gradient"] / row["reference"] - 1
        note = f"biased, by {bias:+.1%}; {apart:.1f} standard errors away"
    else:
        note = f"{apart:.1f} standard errors away"
    heavy = row["heaviest_seed"]
    return f"{note}; one seed makes {heavy:.0%} of its variance" if heavy > 0.25 else note


def tabulate(rows: list[dict[str, Any]]) -> str:
    """A row for every setting, T, parameter and estimator."""
    cells = [
        [
            f"{row['beta']:g}",
            str(row["episodes"]),
            f"log {row['parameter']}",
            row["estimator"],
            f"{row['gradient']:.4g}" + (f" ± {row['standard_error']:.2g}" if row["seeds"] else ""),
            seconds(row["seconds"]),
            verdict(row) if row["estimator"] != REFERENCE else "the reference",
        ]
        for row in rows
    ]
    header = ["beta", "T", "in", "estimator", "gradient", "core time", "beside the differences"]
    return table(header, cells, left=(2, 3, 6))


def draw(rows: list[dict[str, Any]], shown: str) -> Any:
    """One column per setting: the gradient over its reference, and the error with 1,000 seeds."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["parameter"] == shown]
    betas = list(dict.fromkeys(row["beta"] for row in rows))
    figure = Figure(figsize=(3.4 * len(betas) + 0.8, 6.2), layout="constrained")
    grid = figure.subplots(2, len(betas), squeeze=False, sharex=True, sharey="row")
    for beta, (above, below) in zip(betas, grid.T, strict=True):
        for i, estimator in enumerate((REFERENCE, PATHWISE, UNBIASED, FORECAST)):
            kept = [row for row in rows if row["beta"] == beta and row["estimator"] == estimator]
            t, unit, values, errors, seeds = np.array(
                [
                    [row[key] for row in kept]
                    for key in ("episodes", "reference", "gradient", "standard_error", "seeds")
                ]
            )
            look = {"color": f"C{i}", "marker": "o", "markersize": 4, "label": estimator}
            above.errorbar(
                t * 1.08 ** (i - 1.5), values / unit, 1.96 * errors / abs(unit), capsize=2, **look
            )
            if estimator != FORECAST:
                below.plot(t, errors / abs(unit) * np.sqrt(seeds / 1000), **look)
        above.set(title=f"β = {beta:g}", ylim=(-1, 4))
        below.axhspan(1, 1e30, color="0.94", zorder=0)  # the error is larger than the gradient
        below.set(xscale="log", yscale="log", xlabel="episodes T", ylim=(1e-3, 1e8))
    grid[0, 0].set_ylabel("estimate / reference (95 %)")
    grid[1, 0].set_ylabel("standard error of 1,000 seeds\n/ |gradient|")
    labelled = grid[0, 0].get_legend_handles_labels()
    figure.legend(*labelled, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"The gradient of the regret in log {shown}, through the run")
    return figure


def main(args: Args) -> Path:
    """Estimate, compare, draw."""
    torch.set_num_threads(1)
    directory = run_directory(args.root, "meta_gradients", args.seed)
    write_configuration(directory, args)
    if args.shown not in ("alpha", "gamma", "beta"):
        raise ValueError(f"shown: expected alpha, gamma or beta, got {args.shown}")
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.actions, seed=args.seed)
    mean = torch.rand(
        mdp.num_states,
        mdp.num_actions,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(args.seed),
    )
    estimate(replace(args, seeds=2), mdp, mean, 1.0, 1)  # compiled before anything is timed
    rows: list[dict[str, Any]] = []
    for beta in args.betas:
        for T in args.episodes:
            answers, names, count = estimate(args, mdp, mean, beta, T)
            rows += rows_of(answers, names, beta, T, count)
            spent = seconds(sum(answer.seconds for answer in answers.values()))
            print(f"beta = {beta:g}, T = {T}: {count} seeds, {spent}", flush=True)
            write_csv(directory / "gradients.csv", rows)
    write_figure(directory / "gradients.png", draw(rows, args.shown))
    text = f"{tabulate(rows)}\n\n{machine()}"
    write_text(directory / "report.txt", text)
    print(f"\n{text}\n\nwritten to {directory}: gradients.png, gradients.csv, report.txt")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
