"""The regret of the paper's algorithm with its terms and bounds, and the statements on random MDPs.

First the algorithm plays with the paper's parameters, against stochastic losses and against an
adversary, and `torch_occ.theory.Certificate` evaluates the regret bound. Then the statements of the
paper are evaluated on some hundred random MDPs. Half of these are nearly deterministic, and the
policies are between uniform and deterministic. docs/theory.md explains the labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor

import torch_occ as occ
from experiments.common import machine, run_directory, table, write_csv, write_figure
from experiments.games import loss_with_gap, write_configuration, write_text
from experiments.theory_figures import draw_runs, draw_tightness
from torch_occ import theory
from torch_occ.theory.surveys import batch_of_mdps, survey

STOCHASTIC, ADVERSARIAL = "stochastic", "adversarial"


@dataclass(frozen=True)
class Args:
    """How long is played, and on how many MDPs the statements are evaluated."""

    episodes: int = 10000
    """T"""
    seeds: int = 16
    """independent runs of each game"""
    seed: int = 1
    """of the MDPs, the losses and the first run"""
    horizon: int = 3
    """L"""
    width: int = 3
    """states in each layer but the first"""
    actions: int = 3
    """A"""
    gap: float = 0.4
    """of every suboptimal action, in the stochastic game"""
    adversary: Literal["walk", "greedy", "switching"] = "walk"
    """walk: every loss is a random walk in [0, 1]; greedy: each state's most likely action costs 1;
    switching: two tables take turns"""
    mdps: int = 40
    """random MDPs of each size, and as many nearly deterministic ones"""
    sizes: tuple[tuple[int, int, int], ...] = ((1, 1, 4), (2, 3, 2), (3, 3, 3), (5, 2, 3))
    """horizon, width and actions of these MDPs"""
    tensorboard: bool = True
    """write TensorBoard logs"""
    root: Path = Path("runs")
    """where the run's directory goes"""


# -- the games ------------------------------------------------------------------------------------


def environments(args: Args, mdp: occ.LayeredMDP) -> dict[str, occ.LossProcess]:
    """The two loss processes."""
    mean = loss_with_gap(mdp, args.gap, args.seed)
    adversaries: dict[str, occ.LossProcess] = {
        "walk": occ.RandomWalkLosses(step=0.02),
        "greedy": occ.GreedyAdversary(),
        "switching": occ.SwitchingLosses(torch.stack([mean, 1 - mean]), 100, noise="bernoulli"),
    }
    return {STOCHASTIC: occ.BernoulliLosses(mean), ADVERSARIAL: adversaries[args.adversary]}


def play(
    args: Args, mdp: occ.LayeredMDP, losses: occ.LossProcess, directory: Path
) -> dict[str, Tensor]:
    """One game of `alg:main_alg` under the certificate; its curves, `(seeds, C)` each."""
    board = occ.TensorBoard(directory, images_per_decade=0) if args.tensorboard else None
    certificate = theory.Certificate(board)
    history = occ.simulate(
        mdp,
        occ.FTRL(mdp, occ.jin_luo(mdp)),
        losses,
        args.episodes,
        range(args.seed, args.seed + args.seeds),
        callbacks=[*([board] if board else []), certificate],
        config={"experiment": "theory"},
    )
    if args.tensorboard:
        history.save(directory / "history.npz")
    return certificate.curves


def add_stochastic_bound(args: Args, mdp: occ.LayeredMDP, curves: dict[str, Tensor]) -> None:
    """`col:stochastic_bound` with its constants, for the game in which it holds (C = 0)."""
    plan = occ.optimal_policy(mdp, loss_with_gap(mdp, args.gap, args.seed))
    t = curves["episodes"].to(mdp.dtype)
    bound = theory.stochastic_bound(mdp, theory.Parameters.paper(mdp), plan.gaps, plan.policy, t)
    curves["bound_stochastic"] = bound.expand_as(curves["regret"])


TERMS = {
    "regret": "regret against each seed's best policy",
    "regret_shared": "regret against one best policy for all seeds",
    "penalty": "sum of (1/eta_t - 1/eta_(t-1)) (phi_H(q_opt) - phi_H(q_t))",
    "penalty_bound": "the same, lem:key_lemma_bound_penalty",
    "stability": "8 sum of eta_t E|estimate_t|^2, inverse Hessian of phi_H",
    "stability_first_step": "the same, lem:stability_first_step",
    "stability_bound": "the same, lem:key_lemma_bound_stability",
    "lower_order": "2L + beta |S||A| log T + ..., lem:proper_comparator",
    "bound_terms": "penalty + stability + lower order, lem:key_lemma_ftrl",
    "bound_lemmas": "with both lemmas in place of both terms",
    "bound_adversarial": "col:adversarial_bound, explicit",
    "bound_stochastic": "col:stochastic_bound, explicit",
}


# -- the statements -------------------------------------------------------------------------------


@dataclass
class Summary:
    """A statement over all its instances."""

    label: str
    relation: str
    instances: int
    violations: int
    left: float  # both sides where they are closest, relative to the right one
    right: float
    ratios: list[float]

    @property
    def slack(self) -> float:
        return self.right - self.left


def summarize(found: Sequence[theory.Statement]) -> Summary:
    """All instances of one label."""
    left, right, holds = (
        torch.cat([getattr(x, name).flatten() for x in found])
        for name in ("left", "right", "holds")
    )
    if found[0].relation == "=":  # show the worst instance of an equality
        at = int((right - left).abs().argmax())
    elif bool((right > 0).any()):  # the tightest instance; two sides that vanish say nothing
        at = int(torch.where(right > 0, left / right, -torch.inf).argmax())
    else:
        at = int(left.argmax())
    positive = right > 0
    ratios = (left[positive] / right[positive]).tolist() if found[0].relation == "<=" else []
    return Summary(
        found[0].label,
        found[0].relation,
        len(left),
        int((~holds).sum()),
        float(left[at]),
        float(right[at]),
        ratios,
    )


def evaluate(args: Args) -> list[Summary]:
    """Every statement on every MDP, by label."""
    found: dict[str, list[theory.Statement]] = {}
    for i, size in enumerate(args.sizes):
        for concentration in (1.0, 0.05):
            mdp = batch_of_mdps(
                args.mdps, *size, seed=args.seed + 1000 * i, concentration=concentration
            )
            generator = torch.Generator().manual_seed(args.seed + i)
            for statement in survey(mdp, generator):
                found.setdefault(statement.label, []).append(statement)
    return [summarize(statements) for statements in found.values()]


def statement_cells(summary: Summary) -> list[str]:
    """One line of the table."""
    ratio = ""
    if summary.right > 0 and summary.relation == "<=":
        ratio = f"{summary.left / summary.right:.3g}"
    verdict = "holds" if not summary.violations else f"FAILS in {summary.violations}"
    sides = [f"{summary.left:.4g}", summary.relation, f"{summary.right:.4g}"]
    words = WORDS.get(summary.label.partition(",")[0], "")
    numbers = [f"{summary.instances}", *sides, f"{summary.slack:.3g}", ratio]
    return [words, summary.label, *numbers, verdict]


WORDS = {
    "eq:quadratic_form": "w'Hw as a sum of squares",
    "eq:hybrid_alternative": "both definitions of q(s), along a tangent",
    "lem:def_M": "H = M_(L-1), largest difference",
    "lem:M_inverse": "M_k times its Woodbury inverse, largest difference",
    "eq:def_N": "N_k is the last block of the inverse of M_k",
    "thm:main_general": "an episode of the theorem, from both lemmas",
    "lem:convex_combine": "Omega is convex: flow residual of a mixture",
    "eq:state_reach_prob_bound": "states of a layer are reached with probability <= 1",
    "lem:state_reach_probabilty": "and those of all layers sum to <= L",
    "lem:induction_state_reach_prob": "induction lemma, its condition",
    "eq:induction_ineq": "induction lemma, its conclusion",
    "eq:key_ineq_sqrt_diff": "induction condition for q_1 - q_2",
    "lem:sqrt_diff": "sum sqrt q_1(s) - sqrt q_2(s), policy against mapping",
    "lem:sqrt_diff_2": "the same for two mappings",
    "eq:penalty_decomposition": "phi_H(q_opt) - phi_H(q) in two parts",
    "lem:penalty_term_1": "the first part of the penalty",
    "lem:key_lemma_bound_penalty": "the penalty lemma",
    "J_2 <= sqrt(L|S||A|) J_1": "Cauchy-Schwarz in the proof of thm:main_general",
    "lem:H_and_N": "a block of the inverse Hessian against N_k",
    "lem:N_properties": "N_k > 0, N_k <= D^-1, N_k <= C^-1 + P'NP (eigenvalues)",
    "lem:quadratic_form_diagonal": "w'Mw against its diagonal",
    "lem:stability_first_step": "E|estimate|^2 against diagonals of N_k",
    "eq:R0": "first layer of the second step",
    "eq:R": "next layer of the second step",
    "eq:R_bound": "R(s,a) <= 4 q^(3/2), worst ratio",
    "lem:stability_second_step": "diagonals of N_k against sqrt q outside pi",
    "lem:key_lemma_bound_stability": "the stability lemma",
    "lem:close_hessian": "Hessians of psi_t at close points (eigenvalue)",
    "lem:smooth_update": "tilde q_t against q_t, worst ratio",
    "eq:earlier_argument": "length of the update in the norm of psi_t",
    "eq:convex_eq": "|estimate|^2 <= L / beta in the norm of psi_t",
    "eq:simple_decomposition": "regret = stability + mixed penalty",
    "lem:bound_stability": "stability of an episode against 8 |estimate|^2",
    "lem:bound_penalty": "mixed penalty of a run",
    "lem:key_lemma_ftrl": "regret of a run against penalty + stability",
    "lem:proper_comparator": "the comparator v = (1 - 1/T) q_opt + q_1/T",
    "performance difference": "<q - q_opt, mean> = sum q gaps",
    "eq:self_bounding_constraint": "self-bounding under corruption",
    "lem:opt_implict_bound": "T sum q_opt gaps <= C",
}


# -- main -----------------------------------------------------------------------------------------


def main(args: Args) -> Path:
    """Play, evaluate, draw, print."""
    torch.set_num_threads(1)
    directory = run_directory(args.root, "theory", args.seed)
    write_configuration(directory, args)
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.actions, seed=args.seed)
    print(
        f"alg:main_alg with the paper's parameters, {args.episodes:,} episodes, "
        f"{args.seeds} seeds; {machine()}\n",
        flush=True,
    )
    games: dict[str, dict[str, Tensor]] = {}
    for place, losses in environments(args, mdp).items():
        games[place] = play(args, mdp, losses, directory / place)
    add_stochastic_bound(args, mdp, games[STOCHASTIC])
    write_csv(
        directory / "runs.csv",
        [row for place, curves in games.items() for row in run_rows(place, curves)],
    )
    write_figure(directory / "theory.png", draw_runs(games, mdp))

    lines = [
        [words, name, *(number(games[place], name) for place in games)]
        for name, words in TERMS.items()
    ]
    runs = table(["term or bound at T", "theory/*", *games], lines, left=(0, 1))
    smooth = ", ".join(
        f"{place} [{float(curves['smoothness_min'].min()):.4f}, "
        f"{float(curves['smoothness_max'].max()):.4f}]"
        for place, curves in games.items()
    )
    print(
        f"{runs}\n\ntilde q_t / q_t over all checkpoints, seeds and pairs: {smooth} "
        "(lem:smooth_update: [0.5, 2])\n",
        flush=True,
    )

    summaries = evaluate(args)
    count = 2 * args.mdps * len(args.sizes)
    header = ["statement", "label", "instances", "left", "", "right", "slack", "left/right", ""]
    statements = table(
        header, [statement_cells(summary) for summary in summaries], left=(0, 1, 4, 8)
    )
    broken = [summary.label for summary in summaries if summary.violations]
    verdict = (
        f"{len(summaries) - len(broken)} of {len(summaries)} statements hold in every instance."
    )
    verdict += "".join(f" FAILS: {label}." for label in broken)
    print(
        f"Every statement on {count} random MDPs, half of them nearly deterministic; "
        "both sides where they are closest:\n",
        flush=True,
    )
    print(f"{statements}\n\n{verdict}")
    write_csv(directory / "statements.csv", [statement_row(summary) for summary in summaries])
    write_figure(
        directory / "tightness.png",
        draw_tightness({x.label: x.ratios for x in summaries if x.ratios}, count),
    )
    write_text(directory / "report.txt", f"{runs}\n\n{statements}\n\n{verdict}")
    print(
        f"\nwritten to {directory}: theory.png, tightness.png, runs.csv, statements.csv, report.txt"
    )
    return directory


def number(curves: dict[str, Tensor], name: str) -> str:
    """The mean over seeds at T, or nothing."""
    return f"{float(curves[name][:, -1].mean()):,.0f}" if name in curves else ""


def run_rows(place: str, curves: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Means over seeds, one row per checkpoint."""
    names = [
        name for name in (*TERMS, "smoothness_min", "smoothness_max") if name != "bound_stochastic"
    ]
    means = {name: curves[name].mean(0).tolist() for name in names}
    stochastic = (
        curves["bound_stochastic"].mean(0).tolist()
        if "bound_stochastic" in curves
        else [math.nan] * len(curves["episodes"])
    )
    return [
        {"game": place, "episode": t}
        | {name: means[name][i] for name in names}
        | {"bound_stochastic": stochastic[i]}
        for i, t in enumerate(curves["episodes"].tolist())
    ]


def statement_row(summary: Summary) -> dict[str, Any]:
    """The same as the table, for a CSV file."""
    row: dict[str, Any] = {
        "label": summary.label,
        "relation": summary.relation,
        "instances": summary.instances,
    }
    return row | {
        "violations": summary.violations,
        "left": summary.left,
        "right": summary.right,
        "slack": summary.slack,
    }


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
