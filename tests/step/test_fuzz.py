"""Fuzzing: a step is certified and right, as the judge of experiments/fuzz.py says, or honest.

tests/experiments/test_fuzz.py compares the judge with 60 digits.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import torch_occ as occ
from experiments.fuzz import Args, replay, try_batch
from experiments.fuzz_problems import FAMILIES, draw, neighbours
from torch_occ import Status


@pytest.mark.parametrize("kind", ["reasonable", "extreme"])
@pytest.mark.parametrize("backend", ["torch", "auto"])  # the engine has no entropy of visits
@pytest.mark.parametrize("family", FAMILIES)
def test_certified_or_honest(family, backend, kind):
    """Rounding may be too coarse for a few extreme steps; then derivatives are NaN."""
    steps = failed = 0
    for seed in range(5):
        random = np.random.default_rng(seed)
        batch = draw(random, family, kind, 16)
        found, solution = try_batch(random, batch, backend)
        warm = neighbours(random, batch, solution.q.numpy(), solution.converged.numpy())
        more, _ = try_batch(random, warm, backend)
        for tally in (found, more):
            assert tally.wrong == tally.unjudged == tally.missed == 0
            assert tally.judged == tally.certified > 0
            assert tally.planted > 0
        assert (solution.q[:, ~batch.mdp.actions] == 0).all()
        good = solution.converged
        steps, failed = steps + len(good), failed + int((~good).sum())
        honest = {Status.STALLED} | ({Status.UNDERFLOW} if family == "visits" else set())
        assert set(solution.status[~good].tolist()) <= honest

        parameters = {name: torch.from_numpy(x) for name, x in batch.parameters.items()}
        psi = FAMILIES[family].build(batch.mdp, parameters)
        loss = torch.from_numpy(batch.loss).requires_grad_()
        again = occ.FTRLStep(batch.mdp, psi, backend=backend).solve(
            loss, torch.from_numpy(batch.t), check=False
        )
        slopes = torch.autograd.grad(again.q.sum() + again.value.sum(), loss)[0]
        slopes = slopes[:, batch.mdp.actions]
        assert torch.equal(again.status, solution.status)
        assert slopes[good].isfinite().all()
        assert slopes[~good].isnan().all()
    if kind == "reasonable":
        assert failed == 0
    elif family != "visits":  # prices of up to 1e7 times the weight underflow
        assert failed <= 0.03 * steps


PROBLEMS = sorted(Path(__file__).parents[1].glob("record/fuzz/*.npz"))


@pytest.mark.parametrize("path", PROBLEMS, ids=lambda path: path.stem)
def test_problems_that_were_certified_with_a_wrong_q(path):
    assert replay(Args(backends=("auto", "engine", "torch")), path) == 0
