"""The demo: play best_of_both_worlds, then swap the regularizer and differentiate through the step.

`make demo` runs it. It takes the arguments of best_of_both_worlds.
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
from experiments.regularizers import Mine
from experiments.step import finite_difference


def swap(mdp: occ.LayeredMDP, mean: torch.Tensor, episodes: int = 300) -> None:
    """Play the same game with another regularizer, and print its source."""
    print("Swap the regularizer: this is all the code of one in experiments/regularizers.py\n")
    print(inspect.getsource(Mine))
    eta, seeds = occ.InverseSqrt(1.0), range(8)
    for name, psi in {"jin_luo, β = 1": occ.jin_luo(mdp, beta=1.0), "Mine": Mine() / eta}.items():
        history = occ.simulate(mdp, occ.FTRL(mdp, psi), occ.BernoulliLosses(mean), episodes, seeds)
        found = float(history.regret[:, -1].mean())
        steps = f"{float(history.newton_steps.mean()):.1f} Newton steps per episode"
        print(f"  {name:15} regret {found:6.1f} after {episodes} episodes; {steps}")


def differentiate(mdp: occ.LayeredMDP, mean: torch.Tensor, t: int = 1000) -> None:
    """Print the expected regret of q_t in one episode and its gradient in the constants."""
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=1.0), backend="torch")  # nothing to compile
    gaps = occ.optimal_policy(mdp, mean).gaps
    regret = (step(t * mean, t) * gaps).sum()
    regret.backward()
    rows = []
    for name, parameter in step.named_parameters():
        assert parameter.grad is not None
        differences = finite_difference(step, parameter, t * mean, t, gaps)
        numbers = [f"{float(parameter.grad):+.9e}", f"{differences:+.9e}"]
        rows.append([name.rpartition(".")[2], f"{float(parameter.detach()):.4g}", *numbers])
    print(
        f"\nA gradient through the step: at t = {t:,} the expected regret of q_t in one episode is"
    )
    print(f"{float(regret.detach()):.6f}. Its derivatives in the constants:\n")
    print(table(["", "value", "implicit", "differences"], rows))


def main(args: Args) -> Path:
    """Play, then swap and differentiate on the same MDP."""
    directory = best_of_both_worlds.main(args)
    mdp, mean = args.problem()
    print()
    swap(mdp, mean)
    differentiate(mdp, mean)
    print(f"\nThe figure is {directory / 'regret.png'}; `make board` opens the run in TensorBoard.")
    print("For more about the step: python -m experiments.step")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
