"""The step on a small MDP: the occupancy measure, its gradients, and what cvxpylayers makes of the same problem.

python -m experiments.step --help
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import torch_occ as occ
from experiments.common import run_directory, table, write_figure
from torch_occ.reference import Comparison, compare

#: Episodes at which the occupancy is drawn.
SHOWN = (1, 1_000, 10_000, 1_000_000)


@dataclass
class Args:
    """The MDP, the constants of the regularizer and the episode."""

    horizon: int = 4
    """decisions in an episode"""
    width: int = 3
    """states in every layer but the first, which has one"""
    num_actions: int = 3
    """actions of every state"""
    alpha: float | None = None
    """weight of sqrt(q(s) - q(s,a)); the paper's 1 / sqrt(A) by default"""
    beta: float | None = None
    """weight of the log-barrier; the paper's 64 L by default"""
    gamma: float | None = None
    """eta_t = gamma / sqrt(t); the paper's 1 by default"""
    t: int = 1_000
    """the episode of the gradients and of the cross-check"""
    cross_check: bool = True
    """solve and differentiate with cvxpylayers too"""
    seed: int = 0
    """seed of the MDP and of the losses"""
    root: Path = Path("runs")
    """where the run's directory is made"""


@dataclass
class Result:
    """What the script found."""

    q: Tensor  # (len(SHOWN), S, A)
    gaps: Tensor  # (S, A): what each action costs beyond the best one
    loss_gradient: Tensor  # (S, A), of the expected regret of q_t
    episodes: Tensor  # (E,)
    regret: Tensor  # (E,): expected regret of q_t in one episode
    elasticities: dict[str, Tensor]  # d regret / d log parameter, (E,)
    comparison: Comparison | None


def solve(args: Args, mdp: occ.LayeredMDP, mean: Tensor) -> Result:
    """Everything that is printed and drawn. The cumulative loss at episode t is t times its mean."""
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, args.alpha, args.beta, args.gamma))
    gaps = occ.optimal_policy(mdp, mean).gaps

    # One step, its certificate and its gradients.
    loss = (args.t * mean).requires_grad_()
    solution = step.solve(loss, args.t)
    parameters = {name.rpartition(".")[2]: parameter for name, parameter in step.named_parameters()}
    regret = (solution.q * gaps).sum()
    loss_gradient, *gradients = torch.autograd.grad(regret, [loss, *parameters.values()])
    print(f"{mdp}, episode t = {args.t}")
    print(
        f"solved in {int(solution.steps)} Newton steps: relative error of q {float(solution.dual_residual):.0e}, "
        f"flow constraints {float(solution.flow_residual):.0e}\n"
    )
    print_occupancy(mdp, solution.q.detach(), gaps)
    print(f"\nexpected regret of this q in one episode: {float(regret.detach()):.4f}")
    print(
        "its gradient in the constants, by the implicit function theorem and by finite differences:\n"
    )
    rows = []
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        differences = finite_difference(step, parameter, loss.detach(), args.t, gaps)
        rows.append(
            [
                name,
                f"{float(parameter.detach()):.4g}",
                f"{float(gradient):+.9e}",
                f"{differences:+.9e}",
            ]
        )
    print(table(["", "value", "implicit", "differences"], rows) + "\n", flush=True)

    # The same at many episodes at once: t and the loss are batched, and forward mode differentiates all of them together.
    def regrets(logs: dict[str, Tensor]) -> Tensor:
        named = {full: logs[full.rpartition(".")[2]].exp() for full, _ in step.named_parameters()}
        q = torch.func.functional_call(step, named, (episodes[:, None, None] * mean, episodes))
        return (q * gaps).sum((-2, -1))

    episodes = torch.logspace(0, 6, 61, dtype=torch.float64)
    logs = {
        name: parameter.detach().log()
        for name, parameter in parameters.items()
        if bool(parameter > 0)
    }
    logs |= {
        name: torch.full_like(parameter, -torch.inf)
        for name, parameter in parameters.items()
        if name not in logs
    }
    elasticities = torch.func.jacfwd(regrets)(logs)
    shown = torch.tensor(SHOWN, dtype=torch.float64)
    with torch.no_grad():
        q = step(shown[:, None, None] * mean, shown)
        curve = regrets(logs)
    comparison = (
        compare(mdp, step.regularizer, loss.detach(), float(args.t)) if args.cross_check else None
    )
    if comparison is not None:
        print(
            f"the same problem in cvxpylayers, judged by the equations that a right answer satisfies\n\n{comparison}\n",
            flush=True,
        )
    return Result(q, gaps, loss_gradient, episodes, curve, elasticities, comparison)


def finite_difference(
    step: occ.FTRLStep, parameter: Tensor, loss: Tensor, t: float, gaps: Tensor
) -> float:
    """d regret / d parameter by central differences of fourth order, with nothing but solves."""
    value, ends = parameter.detach().clone(), []
    h = 1e-2 * max(float(value), 1e-3)
    with torch.no_grad():
        for shift in (-2, -1, 1, 2):
            parameter.copy_(value + shift * h)
            ends.append(float((step(loss, t) * gaps).sum()))
        parameter.copy_(value)
    return (ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / (12 * h)


def print_occupancy(mdp: occ.LayeredMDP, q: Tensor, gaps: Tensor) -> None:
    """q with a bar a pair; * marks the best action."""
    print("layer state  q(s)   q(s,a), * the best action")
    for s in range(mdp.num_states):
        cells = [
            f"{float(q[s, a]):.3f}{'*' if gaps[s, a] == 0 else ' '} {'█' * round(12 * float(q[s, a] / q[s].sum())):12}"
            for a in range(mdp.num_actions)
        ]
        print(
            f"{int(mdp.layer[s]):5} {s - mdp.layer_slices[int(mdp.layer[s])].start:5}  {float(q[s].sum()):.3f}  {' '.join(cells)}".rstrip()
        )


# -- the figure -----------------------------------------------------------------------------------------------------------


def draw(args: Args, mdp: occ.LayeredMDP, result: Result) -> Figure:
    """q over time above; the gradients and the cross-check below."""
    figure = Figure(figsize=(12.5, 8.2), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[1, 1.02], hspace=0.04)
    upper, lower = parts
    upper.suptitle(
        "The FTRL step $q_t$ as losses come in: colour and numbers are $q_t(s,a)$, frames mark the best actions",
        fontsize=12,
    )
    panels = upper.subplots(1, len(SHOWN))
    for panel, t, q in zip(panels, SHOWN, result.q, strict=True):
        image = heat(panel, mdp, q, result.gaps, cmap="viridis", norm=PowerNorm(0.5, 0.0, 1.0))
        panel.set_title(f"t = {t:,}", fontsize=11)
    panels[0].set_ylabel("layer")
    upper.colorbar(image, ax=list(panels), fraction=0.02, pad=0.01, ticks=[0, 0.05, 0.2, 0.5, 1])

    left, middle, right = lower.subplots(1, 3, width_ratios=[1, 1.5, 1.5])
    limit = max(float(result.loss_gradient.abs().max()), 1e-300)
    image = heat(
        left,
        mdp,
        result.loss_gradient,
        result.gaps,
        cmap="RdBu_r",
        vmin=-limit,
        vmax=limit,
        frame="0.25",
        numbers=False,
    )
    left.set_title(f"d regret / d loss at t = {args.t:,}", fontsize=11)
    left.set_ylabel("layer")
    lower.colorbar(image, ax=left, fraction=0.08, pad=0.03, format="%.0e", ticks=[-limit, 0, limit])

    for i, (name, slope) in enumerate(result.elasticities.items()):
        middle.plot(
            result.episodes,
            slope,
            color=f"C{i}",
            linewidth=2,
            label=rf"$\partial\,$regret$\,/\,\partial\log\,\{name}$",
        )
    middle.plot(
        result.episodes,
        result.regret,
        color="0.6",
        linestyle="--",
        linewidth=1.4,
        label="regret of $q_t$ in one episode",
    )
    middle.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    middle.set(xscale="log", xlabel="episode t")
    middle.set_title("What the constants do, by forward mode", fontsize=11)
    middle.legend(frameon=False, fontsize=9)
    plain(middle)
    draw_comparison(right, result.comparison)
    return figure


def heat(
    panel: Axes,
    mdp: occ.LayeredMDP,
    x: Tensor,
    gaps: Tensor,
    *,
    frame: str = "#ff8c42",
    numbers: bool = True,
    **colours: Any,
) -> Any:
    """Pairs as cells, layers apart, a frame around each best action."""
    image = panel.imshow(x, aspect="auto", **colours)
    for s in range(mdp.num_states):
        for a in range(mdp.num_actions):
            entry = float(x[s, a])
            if numbers and mdp.num_pairs <= 60:
                text = (
                    "1" if entry > 0.995 else f"{entry:.2f}".lstrip("0") if entry >= 0.005 else "0"
                )
                panel.text(
                    a,
                    s,
                    text,
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if entry < 0.4 else "black",
                )
            if gaps[s, a] == 0:
                panel.add_patch(
                    Rectangle(
                        (a - 0.44, s - 0.36), 0.88, 0.72, fill=False, edgecolor=frame, linewidth=1.6
                    )
                )
    for here in mdp.layer_slices[1:]:
        panel.axhline(here.start - 0.5, color="white", linewidth=4)
    panel.set_yticks(
        [(here.start + here.stop - 1) / 2 for here in mdp.layer_slices],
        [str(k) for k in range(mdp.horizon)],
    )
    panel.set_xticks(range(mdp.num_actions))
    panel.set_xlabel("action")
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    return image


def draw_comparison(panel: Axes, comparison: Comparison | None) -> None:
    """The residual of d loss for each side: right answers are far to the left."""
    panel.set_title("Who satisfies the equations of the gradient?", fontsize=11)
    if comparison is None:
        panel.axis("off")
        panel.text(
            0.5,
            0.5,
            "no cross-check in this run",
            ha="center",
            color="0.5",
            transform=panel.transAxes,
        )
        return
    answers = comparison.answers[::-1]
    for y, answer in enumerate(answers):
        error = max(answer.errors["loss"], 1e-17)
        colour = "#2a7f62" if error <= comparison.tolerance else "#c1292e"
        panel.plot([1e-17, error], [y, y], color=colour, linewidth=2.2, solid_capstyle="round")
        panel.plot(error, y, "o", color=colour, markersize=8)
        panel.annotate(
            f"{error:.0e}",
            (error, y),
            (0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=colour,
        )
    panel.axvline(comparison.tolerance, color="0.6", linestyle=":", linewidth=1.2)
    panel.set(
        xscale="log",
        xlim=(1e-17, 1e3),
        ylim=(-0.6, len(answers) - 0.3),
        xlabel="relative residual of d loss; red is wrong",
    )
    panel.set_yticks(
        range(len(answers)),
        [answer.name.replace("cvxpylayers, ", "cvxpylayers,\n") for answer in answers],
        fontsize=9,
    )
    plain(panel)


def plain(panel: Axes) -> None:
    """Only the axes that carry numbers."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.2)


# -- the log --------------------------------------------------------------------------------------------------------------


def log(directory: Path, args: Args, result: Result, figure: Figure) -> None:
    """Arguments, curves over t and the figure, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(directory))
    options = [[name, str(value)] for name, value in asdict(args).items()]
    writer.add_text("arguments", table(["argument", "value"], options))
    for i, t in enumerate(result.episodes.round().long().tolist()):
        writer.add_scalar("step/regret", float(result.regret[i]), t)
        for name, slope in result.elasticities.items():
            writer.add_scalar(f"gradient/log_{name}", float(slope[i]), t)
    if result.comparison is not None:
        for answer in result.comparison.answers:
            writer.add_scalar(
                f"residual_of_d_loss/{answer.name.replace(', ', '_').replace(' ', '_')}",
                answer.errors["loss"],
            )
    writer.add_figure("step", figure, close=False)
    writer.close()


def main(args: Args) -> Path:
    """Solve, print, draw and log."""
    torch.set_num_threads(1)  # the problem is small
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.num_actions, seed=args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    mean = torch.rand(mdp.num_states, mdp.num_actions, dtype=torch.float64, generator=generator)
    result = solve(args, mdp, mean)
    figure = draw(args, mdp, result)
    directory = run_directory(args.root, "step", args.seed)
    write_figure(directory / "step.png", figure)
    log(directory, args, result, figure)
    (directory / "arguments.json").write_text(
        json.dumps(asdict(args), default=str, indent=2) + "\n"
    )
    print(f"the figure is {directory / 'step.png'}; for TensorBoard, make board")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
