"""The step on a small MDP: the occupancy measure, its gradients, and the answers of cvxpylayers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments.common import run_directory, table, write_figure
from experiments.step_figure import SHOWN, Result, draw
from torch_occ.reference import compare


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
    print(table(["", "value", "implicit", "differences"], rows) + "\n", flush=True)

    # Many episodes at once: t and the loss are batched, and forward mode differentiates them all.
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
        print("the same problem in cvxpylayers, judged by the equations of a right answer\n")
        print(f"{comparison}\n", flush=True)
    return Result(q, gaps, args.t, loss_gradient, episodes, curve, elasticities, comparison)


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


# -- the log --------------------------------------------------------------------------------------


def log(directory: Path, args: Args, result: Result, figure: Figure) -> None:
    """Arguments, curves over t and the figure, for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(directory))
    options = [[name, str(value)] for name, value in asdict(args).items() if name != "root"]
    writer.add_text("arguments", table(["argument", "value"], options))
    for i, t in enumerate(result.episodes.round().long().tolist()):
        writer.add_scalar("step/regret", float(result.regret[i]), t)
        for name, slope in result.elasticities.items():
            writer.add_scalar(f"gradient/log_{name}", float(slope[i]), t)
    if result.comparison is not None:
        for answer in result.comparison.answers:
            name = answer.name.replace(", ", "_").replace(" ", "_")
            writer.add_scalar(f"residual_of_d_loss/{name}", answer.errors["loss"])
    writer.add_figure("step", figure, close=False)
    writer.close()


def main(args: Args) -> Path:
    """Solve, print, draw and log."""
    torch.set_num_threads(1)  # the problem is small
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.num_actions, seed=args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    mean = torch.rand(mdp.num_states, mdp.num_actions, dtype=torch.float64, generator=generator)
    result = solve(args, mdp, mean)
    figure = draw(mdp, result)
    directory = run_directory(args.root, "step", args.seed)
    write_figure(directory / "step.png", figure)
    log(directory, args, result, figure)
    (directory / "arguments.json").write_text(
        json.dumps(asdict(args), default=str, indent=2) + "\n"
    )
    print(f"the figure is {directory / 'step.png'}; make board opens TensorBoard")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
