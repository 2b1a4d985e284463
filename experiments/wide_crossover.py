"""Factorization or conjugate gradients: where they meet, for dense transitions."""

from __future__ import annotations

import time
from typing import Any

import torch

from torch_occ import FTRLStep, LayeredMDP, jin_luo
from torch_occ.step import system as kkt

#: Horizon, width, actions and batch.
CROSSOVER: tuple[tuple[int, int, int, int], ...] = (
    (10, 20, 5, 1),
    (40, 20, 3, 1),
    (10, 40, 5, 1),
    (10, 80, 3, 1),
    (10, 100, 10, 1),
    (10, 150, 5, 1),
    (10, 200, 5, 1),
)
CROSSOVER += ((5, 300, 3, 1), (10, 20, 5, 32), (10, 40, 5, 8), (10, 80, 4, 8), (5, 20, 3, 128))


def measure_crossover(seed: int, t: float) -> list[dict[str, Any]]:
    """Processor time of a warm solve per Newton step on the torch path, both ways.

    The MDPs are random and dense. The rows also say which way the package chooses.
    """
    rows: list[dict[str, Any]] = []
    chooser = kkt.prefers_iterations
    for horizon, width, actions, batch in CROSSOVER:
        mdp = LayeredMDP.random(horizon, width, actions, seed=seed)
        step = FTRLStep(mdp, jin_luo(mdp), backend="torch")
        generator = torch.Generator().manual_seed(seed)
        loss = t * torch.rand(
            batch, mdp.num_states, actions, dtype=torch.float64, generator=generator
        )
        times = []
        with torch.no_grad():
            q = step(loss, t)
            later = loss.clone()
            later[:, ::7, 0] += 1 / q[:, ::7, 0]
            for iterate in (False, True):
                kkt.prefers_iterations = lambda *_, choice=iterate: choice
                trials = []
                for _ in range(5):
                    begun = time.process_time()
                    solution = step.solve(later, t + 1, warm_start=q)
                    trials.append((time.process_time() - begun) / int(solution.steps.max()))
                times.append(min(trials))
        kkt.prefers_iterations = chooser
        chosen = "CG" if chooser(mdp, batch, False) else "factorization"
        row: dict[str, Any] = {"size": (horizon, width, actions), "batch": batch}
        row |= {"factorization": times[0], "CG": times[1], "chosen": chosen}
        rows.append(row | {"lost": times[chosen == "CG"] / min(times) - 1})
    return rows
