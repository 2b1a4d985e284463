"""The Kullback-Leibler projection in cvxpy, with one variable per (s, a, s').

The constraints are stated as in the definition; nothing is eliminated. It is slow and independent
of torch_occ.step.projection, and checks it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.reference.cvxpy_layer import clarabel, require


def project_cvxpy(
    mdp: LayeredMDP,
    q: Tensor,
    transitions: Sequence[Tensor],
    lower: Sequence[Tensor],
    upper: Sequence[Tensor],
    loss: Tensor,
    learning_rate: float,
    **options: Any,
) -> tuple[tuple[Tensor, ...], float]:
    """Project with cvxpy; by default with Clarabel and tight tolerances.

    The arguments are those of `KLProjection.solve`, without a batch.

    Args:
        options: options of `Problem.solve` that replace the defaults.

    Returns:
        q(s,a,s') of every layer, `(S_k, A, S_{k+1})`, and the smallest value of
        learning_rate ⟨q, loss⟩ + KL(q || reference).
    """
    cp = require("cvxpy")
    inflow: Any = mdp.initial.numpy()
    variables, constraints, objective = [], [], 0
    parts = zip(
        *(mdp.split(q, -2), mdp.split(loss, -2), mdp.split(mdp.actions, -2)),
        *(transitions, lower, upper),
        strict=True,
    )
    for weight, cost, mask, p, low, high in parts:
        pairs = mask.nonzero()  # (m, 2), the existing pairs
        reference = (weight.unsqueeze(-1) * p)[mask].numpy()  # (m, n)
        x = cp.Variable(reference.shape)
        total = cp.sum(x, axis=1)
        across = cp.reshape(total, (len(pairs), 1), order="C") @ np.ones((1, p.shape[-1]))
        states = (pairs[:, :1] == torch.arange(len(mask))).double().numpy().T  # (S_k, m)
        constraints += [states @ total == inflow]
        constraints += [x >= cp.multiply(low[mask].numpy(), across)]
        constraints += [x <= cp.multiply(high[mask].numpy(), across)]
        objective += learning_rate * (cost[mask].numpy() @ total)
        # What is impossible under the reference is zero; its upper bound says so.
        possible = reference > 0
        divergence = cp.kl_div(x, np.where(possible, reference, 1.0))
        objective += cp.sum(cp.multiply(possible, divergence))
        inflow = cp.sum(x, axis=0)
        variables.append((x, mask))
    problem = cp.Problem(cp.Minimize(objective), constraints)
    with warnings.catch_warnings():
        # If Clarabel cannot certify the digits asked for, it returns its best point, and cvxpy
        # warns.
        warnings.filterwarnings("ignore", "Solution may be inaccurate", UserWarning)
        # With its usual steps of 0.99 Clarabel stalls at errors of up to 1e-7 in some problems.
        tight = {"solver": "CLARABEL", "max_step_fraction": 0.95, **clarabel(1e-13)}
        problem.solve(**(tight | options))
    found = []
    for x, mask in variables:
        whole = torch.zeros(*mask.shape, x.shape[1], dtype=torch.float64)
        whole[mask] = torch.as_tensor(x.value)
        found.append(whole)
    return tuple(found), float(problem.value)
