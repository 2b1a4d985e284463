"""What `make demo` shows: the main job, best_of_both_worlds, and then what the package is for: swap the regularizer, differentiate.

It takes the arguments of best_of_both_worlds. python -m experiments.demo --help
"""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
import tyro

import torch_occ as occ
from experiments import best_of_both_worlds
from experiments.best_of_both_worlds import Args
from experiments.common import table
from experiments.games import loss_with_gap
from experiments.regularizers import Mine
from experiments.step import finite_difference


def swap(mdp: occ.LayeredMDP, mean: torch.Tensor, episodes: int = 300) -> None:
    """Another regularizer, in the lines that are printed, in the same game."""
    print(
        f"Swap the regularizer: this is one of experiments/regularizers.py, all of it\n\n{inspect.getsource(Mine)}"
    )
    eta, seeds = occ.InverseSqrt(1.0), range(8)
    for name, psi in {"jin_luo, β = 1": occ.jin_luo(mdp, beta=1.0), "Mine": Mine() / eta}.items():
        history = occ.simulate(mdp, occ.FTRL(mdp, psi), occ.BernoulliLosses(mean), episodes, seeds)
        found = float(history.regret[:, -1].mean())
        print(
            f"  {name:15} regret {found:6.1f} after {episodes} episodes; {float(history.newton_steps.mean()):.1f} Newton steps an episode"
        )


def differentiate(mdp: occ.LayeredMDP, mean: torch.Tensor, t: int = 1000) -> None:
    """The expected regret of q_t in one episode, and its gradient in the constants of the regularizer."""
    step, gaps = occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=1.0)), occ.optimal_policy(mdp, mean).gaps
    regret = (step(t * mean, t) * gaps).sum()
    regret.backward()
    rows = []
    for name, parameter in step.named_parameters():
        assert parameter.grad is not None
        differences = finite_difference(step, parameter, t * mean, t, gaps)
        rows.append(
            [
                name.rpartition(".")[2],
                f"{float(parameter.detach()):.4g}",
                f"{float(parameter.grad):+.9e}",
                f"{differences:+.9e}",
            ]
        )
    print(
        f"\nA gradient through the step: at t = {t:,} q_t has regret {float(regret.detach()):.6f} in one episode, and its derivatives are\n"
    )
    print(table(["", "value", "implicit", "differences"], rows))


def main(args: Args) -> Path:
    """Play, then swap and differentiate on the same MDP."""
    directory = best_of_both_worlds.main(args)
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.actions, seed=args.seed)
    mean = loss_with_gap(mdp, args.gap, args.seed)
    print()
    swap(mdp, mean)
    differentiate(mdp, mean)
    print(
        f"\nLook at {directory / 'regret.png'}, or at all of it with `make board`. More of the step: python -m experiments.step"
    )
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
