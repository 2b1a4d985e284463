"""The step on a small MDP: the occupancy measure, its gradients, and the answers of cvxpylayers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

import torch_occ as occ
from experiments import common
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


def solve(args: Args, mdp: occ.LayeredMDP, mean: Tensor) -> None:
    """Compute and print. The cumulative loss at episode t is t times its mean."""
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, args.alpha, args.beta, args.gamma))
    gaps = occ.optimal_policy(mdp, mean).gaps

    # One step, its certificate and its gradients.
    loss = args.t * mean
    solution = step.solve(loss, args.t)
    parameters = {name.rpartition(".")[2]: parameter for name, parameter in step.named_parameters()}
    regret = (solution.q * gaps).sum()
    gradients = torch.autograd.grad(regret, list(parameters.values()))
    print(f"{mdp}, episode t = {args.t}")
    residuals = f"relative error of q {float(solution.dual_residual):.0e}, "
    residuals += f"flow constraints {float(solution.flow_residual):.0e}"
    print(f"solved in {int(solution.steps)} Newton steps: {residuals}\n")
    print_occupancy(mdp, solution.q.detach(), gaps)
    print(f"\nexpected regret of this q in one episode: {float(regret.detach()):.4f}")
    print("its gradient in the constants, by the implicit function theorem and by differences:\n")
    rows = []
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        differences = finite_difference(step, parameter, loss, args.t, gaps)
        numbers = [f"{float(gradient):+.9e}", f"{differences:+.9e}"]
        rows.append([name, f"{float(parameter.detach()):.4g}", *numbers])
    print(common.table(["", "value", "implicit", "differences"], rows) + "\n", flush=True)

    if args.cross_check:
        print("the same problem in cvxpylayers, judged by the equations of a right answer\n")
        found = compare(mdp, step.regularizer, loss, float(args.t))
        print(f"{found}\n", flush=True)


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


def main(args: Args) -> Path:
    """Solve and print."""
    directory = common.begin("step", args, args.seed)
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.num_actions, seed=args.seed)
    solve(args, mdp, common.random_means(mdp, args.seed))
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
