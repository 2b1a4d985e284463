"""Compile the engine ahead, for images and clusters: `python -m torch_occ compile`.

Kernels are kept beside the package, or in the folder that NUMBA_CACHE_DIR names, and later
processes load them in half a second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import torch_occ as occ


def tasks() -> dict[str, Callable[[], object]]:
    """Return small calls that compile what most programs use."""
    mdp = occ.LayeredMDP.random(horizon=3, width=3, num_actions=3, seed=0)
    psi, entropy = occ.jin_luo(mdp), occ.ConditionalEntropy()
    loss = torch.zeros(mdp.actions.shape, dtype=torch.float64)
    losses = occ.BernoulliLosses(loss + 0.5)

    def step(psi: occ.Regularizer, mdp: occ.LayeredMDP, *batch: int) -> None:
        given = loss.expand(*batch, *loss.shape).clone().requires_grad_()
        occ.FTRLStep(mdp, psi, backend="engine")(given, 1).square().sum().backward()

    def play(learner: occ.Learner) -> occ.History:
        return occ.simulate(mdp, learner, losses, 8, range(8), progress=False)

    return {
        "a step and its gradient": lambda: step(psi, mdp),
        "a batch of steps": lambda: step(psi, mdp, 8),
        "a step with sparse transitions": lambda: step(psi, mdp.to_sparse()),
        "a step of an entropy": lambda: step(entropy, mdp),
        "a batch of steps of an entropy": lambda: step(entropy, mdp, 8),
        "a game of FTRL": lambda: play(occ.FTRL(mdp, psi)),
        "a game of the recommended learner": lambda: play(occ.recommended(mdp)),
        "a game of value iteration": lambda: play(occ.OptimisticValueIteration(mdp)),
    }


def command(arguments: list[str] | None = None) -> None:
    """Read the command line, and compile."""
    parser = argparse.ArgumentParser(prog="python -m torch_occ", description=__doc__)
    parser.add_argument("command", choices=["compile"], help="compile the kernels and keep them")
    parser.parse_args(arguments)
    todo, begun = tasks(), time.perf_counter()
    for number, (name, run) in enumerate(todo.items(), 1):
        print(f"{number} of {len(todo)}: {name}", flush=True)
        run()
    print(f"ready after {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    command()
