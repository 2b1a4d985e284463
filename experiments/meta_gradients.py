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
from experiments.meta_gradients_figure import FORECAST, PATHWISE, REFERENCE, UNBIASED, draw

YEAR = 365 * 86400.0


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
    """One row per estimator and parameter, with its bias and its cost."""
    reference, rows = answers[REFERENCE], []
    for estimator, answer in answers.items():
        for i, name in enumerate(names):
            truth, own = float(reference.gradient[i]), float(answer.gradient[i])
            error, theirs = float(answer.error[i]), float(reference.error[i])
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
                    "reference_error": theirs,
                    "relative_bias": own / truth - 1,
                    "distance": 0.0
                    if estimator == REFERENCE
                    else abs(own - truth) / (error**2 + theirs**2) ** 0.5,
                    "heaviest_seed": float(answer.heaviest[i]),
                    "seconds": answer.seconds,
                    # A standard error falls with the square root of the seeds.
                    "seconds_to_10_percent": answer.seconds
                    * max((error / (0.1 * abs(truth))) ** 2, 1 / max(count, 1)),
                }
            )
    return rows


def verdicts(rows: list[dict[str, Any]], shown: str) -> list[str]:
    """Which estimators are usable; only the numbers decide."""
    lines = []
    for key in dict.fromkeys((row["beta"], row["episodes"]) for row in rows):
        for estimator in (PATHWISE, UNBIASED, FORECAST):
            kept = {
                row["parameter"]: row
                for row in rows
                if (row["beta"], row["episodes"], row["estimator"]) == (*key, estimator)
            }
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
            lines.append(f"beta = {key[0]:g}, T = {key[1]}, {estimator}: {note}")
    return lines


def tabulate(rows: list[dict[str, Any]], shown: str) -> str:
    """A row for every setting, T and estimator."""
    names, cells = list(dict.fromkeys(row["parameter"] for row in rows)), []
    for key in dict.fromkeys((row["beta"], row["episodes"], row["estimator"]) for row in rows):
        kept = {
            row["parameter"]: row
            for row in rows
            if (row["beta"], row["episodes"], row["estimator"]) == key
        }
        own = kept[shown]
        found = [
            f"{kept[name]['gradient']:.4g}"
            + (f" ± {kept[name]['standard_error']:.2g}" if own["seeds"] else "")
            for name in names
        ]
        price = own["seconds_to_10_percent"]
        times = [seconds(own["seconds"])]
        times += [seconds(price) if price < YEAR else "> a year"] if own["seeds"] else [""]
        beta, T, estimator = key
        cells.append([f"{beta:g}", str(T), estimator, str(own["seeds"] or ""), *found, *times])
    header = ["beta", "T", "estimator", "seeds", *(f"d / d log {name}" for name in names)]
    header += ["core time", f"for 10 % in {shown}"]
    return table(header, cells, left=(2,))


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
    text = "\n".join([tabulate(rows, args.shown), "", *verdicts(rows, args.shown), "", machine()])
    write_text(directory / "report.txt", text)
    print(f"\n{text}\n\nwritten to {directory}: gradients.png, gradients.csv, report.txt")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
