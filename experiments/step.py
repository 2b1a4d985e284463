"""The step on a small MDP: the occupancy measure, its gradients, and the answers of cvxpylayers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import COLOURS
from torch_occ.reference import compare

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
    """The numbers that are drawn."""

    q: Tensor  # (len(SHOWN), S, A)
    gaps: Tensor  # (S, A): what each action costs beyond the best one
    t: int  # the episode of the gradient
    loss_gradient: Tensor  # (S, A), of the expected regret of q_t
    episodes: Tensor  # (E,)
    regret: Tensor  # (E,): expected regret of q_t in one episode
    elasticities: dict[str, Tensor]  # d regret / d log parameter, (E,)


def solve(args: Args, mdp: occ.LayeredMDP, mean: Tensor) -> Result:
    """Compute what is printed and drawn. The cumulative loss at episode t is t times its mean."""
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, args.alpha, args.beta, args.gamma))
    gaps = occ.optimal_policy(mdp, mean).gaps

    # One step, its certificate and its gradients.
    loss = (args.t * mean).requires_grad_()
    solution = step.solve(loss, args.t)
    parameters = {name.rpartition(".")[2]: parameter for name, parameter in step.named_parameters()}
    regret = (solution.q * gaps).sum()
    loss_gradient, *gradients = torch.autograd.grad(regret, [loss, *parameters.values()])
    print(f"{mdp}, episode t = {args.t}")
    residuals = f"relative error of q {float(solution.dual_residual):.0e}, "
    residuals += f"flow constraints {float(solution.flow_residual):.0e}"
    print(f"solved in {int(solution.steps)} Newton steps: {residuals}\n")
    print_occupancy(mdp, solution.q.detach(), gaps)
    print(f"\nexpected regret of this q in one episode: {float(regret.detach()):.4f}")
    print("its gradient in the constants, by the implicit function theorem and by differences:\n")
    rows = []
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        differences = finite_difference(step, parameter, loss.detach(), args.t, gaps)
        numbers = [f"{float(gradient):+.9e}", f"{differences:+.9e}"]
        rows.append([name, f"{float(parameter.detach()):.4g}", *numbers])
    print(common.table(["", "value", "implicit", "differences"], rows) + "\n", flush=True)

    # Many episodes at once: t and the loss are batched, and forward mode differentiates them all.
    def regrets(logs: dict[str, Tensor]) -> Tensor:
        named = {full: logs[full.rpartition(".")[2]].exp() for full, _ in step.named_parameters()}
        q = torch.func.functional_call(step, named, (episodes[:, None, None] * mean, episodes))
        return (q * gaps).sum((-2, -1))

    episodes = torch.logspace(0, 6, 61, dtype=torch.float64)
    logs = {name: parameter.detach().log() for name, parameter in parameters.items()}
    elasticities = torch.func.jacfwd(regrets)(logs)
    shown = torch.tensor(SHOWN, dtype=torch.float64)
    with torch.no_grad():
        q = step(shown[:, None, None] * mean, shown)
        curve = regrets(logs)
    if args.cross_check:
        print("the same problem in cvxpylayers, judged by the equations of a right answer\n")
        found = compare(mdp, step.regularizer, loss.detach(), float(args.t))
        print(f"{found}\n", flush=True)
    return Result(q, gaps, args.t, loss_gradient, episodes, curve, elasticities)


def finite_difference(
    step: occ.FTRLStep, parameter: Tensor, loss: Tensor, t: float, gaps: Tensor
) -> float:
    """d regret / d parameter by central differences of fourth order, which only need solves."""
    value, ends = parameter.detach().clone(), []
    h = 1e-2 * max(float(value), 1e-3)
    with torch.no_grad():
        for shift in (-2, -1, 1, 2):
            parameter.copy_(value + shift * h)
            ends.append(float((step(loss, t) * gaps).sum()))
        parameter.copy_(value)
    return (ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / (12 * h)


def print_occupancy(mdp: occ.LayeredMDP, q: Tensor, gaps: Tensor) -> None:
    """q with one bar per pair; * marks the best action."""
    print("layer state  q(s)   q(s,a), * the best action")
    for s in range(mdp.num_states):
        policy, cells = q[s] / q[s].sum(), []
        for a in range(mdp.num_actions):
            star, bar = "*" if gaps[s, a] == 0 else " ", "█" * round(12 * float(policy[a]))
            cells.append(f"{float(q[s, a]):.3f}{star} {bar:12}")
        k = int(mdp.layer[s])
        place = f"{k:5} {s - mdp.layer_slices[k].start:5}"
        print(f"{place}  {float(q[s].sum()):.3f}  {' '.join(cells)}".rstrip())


def draw(mdp: occ.LayeredMDP, result: Result) -> Figure:
    """Above, q over time; below, the gradients."""
    figure = common.new_figure(12.5, 8.2)
    parts: Any = figure.subfigures(2, 1, height_ratios=[1, 1.02], hspace=0.04)
    upper, lower = parts
    title = "The FTRL step $q_t$ over time: colours and numbers are $q_t(s,a)$"
    upper.suptitle(f"{title}, frames mark the best actions", fontsize=12)
    panels = upper.subplots(1, len(SHOWN))
    look: dict[str, Any] = {"cmap": "viridis", "norm": PowerNorm(0.5, 0.0, 1.0)}
    for panel, t, q in zip(panels, SHOWN, result.q, strict=True):
        image = heat(panel, mdp, q, result.gaps, frame="#ff8c42", **look)
        panel.set_title(f"t = {t:,}", fontsize=11)
    panels[0].set_ylabel("layer")
    upper.colorbar(image, ax=list(panels), fraction=0.02, pad=0.01, ticks=[0, 0.05, 0.2, 0.5, 1])

    left, right = lower.subplots(1, 2, width_ratios=[1, 2])
    limit = max(float(result.loss_gradient.abs().max()), 1e-300)
    look = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    image = heat(left, mdp, result.loss_gradient, result.gaps, frame="0.25", **look)
    left.set_title(f"d regret / d loss at t = {result.t:,}", fontsize=11)
    left.set_ylabel("layer")
    lower.colorbar(image, ax=left, fraction=0.08, pad=0.03, format="%.0e", ticks=[-limit, 0, limit])

    for i, (name, slope) in enumerate(result.elasticities.items()):
        label = rf"$\partial\,$regret$\,/\,\partial\log\,\{name}$"
        right.plot(result.episodes, slope, color=COLOURS[i], linewidth=2, label=label)
    label, look = "regret of $q_t$ in one episode", {"color": "0.6", "linestyle": "--"}
    right.plot(result.episodes, result.regret, linewidth=1.4, label=label, **look)
    right.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    common.tidy(right, xscale="log", xlabel="episode t")
    right.set_title("Derivatives in the constants, by forward mode", fontsize=11)
    right.legend(frameon=False, fontsize=9)
    return figure


def heat(
    panel: Any, mdp: occ.LayeredMDP, x: Tensor, gaps: Tensor, *, frame: str, **colours: Any
) -> Any:
    """A heat map of pairs, with gaps between layers and a frame around each best action."""
    image = panel.imshow(x, aspect="auto", **colours)
    for s, a in torch.cartesian_prod(*map(torch.arange, x.shape)).tolist():
        q = float(x[s, a])
        if "norm" in colours and mdp.num_pairs <= 60:  # of q itself, with numbers
            text = "1" if q > 0.995 else f"{q:.2f}".lstrip("0") if q >= 0.005 else "0"
            look = {"fontsize": 9, "color": "white" if q < 0.4 else "black"}
            panel.text(a, s, text, ha="center", va="center", **look)
        if gaps[s, a] == 0:
            corner, width = (a - 0.44, s - 0.36), 1.6
            box = Rectangle(corner, 0.88, 0.72, fill=False, edgecolor=frame, linewidth=width)
            panel.add_patch(box)
    for here in mdp.layer_slices[1:]:
        panel.axhline(here.start - 0.5, color="white", linewidth=4)
    middles = [(here.start + here.stop - 1) / 2 for here in mdp.layer_slices]
    panel.set_yticks(middles, [str(k) for k in range(mdp.horizon)])
    panel.set_xticks(range(mdp.num_actions))
    panel.set_xlabel("action")
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    return image


def main(args: Args) -> Path:
    """Solve, print and draw."""
    directory = common.begin("step", args, args.seed)
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.num_actions, seed=args.seed)
    result = solve(args, mdp, common.random_means(mdp, args.seed))
    common.write_figure(directory / "step.png", draw(mdp, result))
    print(f"the figure is {directory / 'step.png'}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
