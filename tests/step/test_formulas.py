"""Formulas as lists of instructions: the numbers and derivatives that torch has, or none at all."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from zoo import REGULARIZERS

import torch_occ as occ
from torch_occ.step.arrays import list_exponents, terms_of
from torch_occ.step.arrays import why_not_game as why_not
from torch_occ.step.compiled import record, slots_of

F64 = torch.float64
MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)
LOSS = 30 * torch.rand(7, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
T = torch.tensor(37.5, dtype=F64)


def regularizers():
    found = {name: make(MDP) for name, make in REGULARIZERS.items()}
    found["every operation"] = (
        occ.Tsallis(0.3) / occ.Polynomial(1.5, 0.4)
        + 2 * (occ.Shannon() * occ.Constant(0.7))
        + occ.LogBarrier(0.1) / 3.0
    )
    # tests/regularizers/test_places.py has those with one value per layer, state or pair.
    return {
        name: psi for name, psi in found.items() if why_not(MDP, psi) is None and not psi.places()
    }


def inputs_of(psi, t=T):
    return [t, *(slot[name] for slot, name in slots_of(psi))]


def outputs_in_torch(psi, t=T):
    terms = terms_of(psi, t)
    return [
        x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=F64)
        for x in (*(term.weight for term in terms), *list_exponents(terms))
    ]


@pytest.mark.parametrize("name", regularizers())
def test_values_and_derivatives_are_those_of_torch(name):
    psi, t = regularizers()[name], T.clone().requires_grad_()
    formula, inputs, expected = record(psi), inputs_of(psi, t), outputs_in_torch(psi, t)
    assert formula is not None
    values, outputs = formula.replay([x.item() for x in inputs])
    assert all(type(x) is float for x in outputs)
    torch.testing.assert_close(
        torch.tensor(outputs, dtype=F64),
        torch.stack([x.detach() for x in expected]),
        rtol=1e-14,
        atol=0,
    )
    bars = torch.linspace(-1.0, 2.0, len(outputs), dtype=F64)
    varying = [(y, bar) for y, bar in zip(expected, bars, strict=True) if y.requires_grad]
    slopes = [torch.zeros_like(x) for x in inputs]
    if varying:
        slopes = torch.autograd.grad(
            [y for y, _ in varying],
            inputs,
            [bar for _, bar in varying],
            allow_unused=True,
            materialize_grads=True,
        )
    torch.testing.assert_close(
        torch.tensor(formula.pull_back(values, bars.tolist()), dtype=F64),
        torch.stack(slopes),
        rtol=1e-13,
        atol=1e-13,
    )


def test_arrays_and_tensors_replay_too():
    psi = regularizers()["every operation"]
    formula, numbers = record(psi), [x.item() for x in inputs_of(psi)]
    alone = formula.replay(numbers)[1]
    for kind in (np.array, lambda x: torch.tensor(x, dtype=F64)):
        together = formula.replay(formula.spread([kind([x, 2 * x]) for x in numbers]))[1]
        assert [float(x[0, 0, 0]) if hasattr(x, "shape") else x for x in together] == pytest.approx(
            alone, rel=1e-14
        )


def test_one_tensor_in_two_places_has_both_derivatives():
    psi = occ.HybridTsallis(0.7) + occ.LogBarrier(0.7)
    psi.terms[1].beta = psi.terms[0].alpha
    formula = record(psi)
    values, outputs = formula.replay([1.0, 0.7, 0.7])
    assert formula.pull_back(values, [1.0] * len(outputs))[1:] == [-1.0, -1.0]


def test_it_can_be_copied():
    formula = record(occ.jin_luo(MDP))
    again = pickle.loads(pickle.dumps(formula))
    assert again.replay([4.0, 0.5, 1.0, 2.0]) == formula.replay([4.0, 0.5, 1.0, 2.0])


class Sudden(occ.Schedule):
    """A schedule that looks at t, which no record can show."""

    def forward(self, t):
        return (
            torch.where(t < 10, 1.0, 0.1)
            if t.dim()
            else torch.tensor(1.0 if t < 10 else 0.1, dtype=t.dtype)
        )


def test_a_schedule_of_somebody_else_is_asked_every_time():
    psi = occ.HybridTsallis(0.5) / Sudden() + occ.LogBarrier(1.0)
    assert record(psi) is None
    engine, plain = (
        occ.FTRLStep(MDP, psi, backend="engine"),
        occ.FTRLStep(MDP, psi, backend="torch"),
    )
    for t in (2.0, 20.0, torch.tensor([2.0, 20.0], dtype=F64)):
        loss = LOSS.clone().requires_grad_()
        solution = engine.solve(loss, t)
        assert solution.backend == "engine"
        torch.testing.assert_close(solution.q, plain(loss, t), rtol=1e-11, atol=0)
        (found,), (expected,) = (
            torch.autograd.grad(step(loss, t)[..., 0, 1].sum(), loss) for step in (engine, plain)
        )
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_numbers_beyond_the_floating_point_go_to_the_torch_path():
    """Python raises where torch says inf; who answers must not matter."""
    psi = occ.Tsallis() / occ.Polynomial(1.0, 200.0) + occ.LogBarrier(1.0)
    answers = [
        occ.FTRLStep(MDP, psi, backend=backend).solve(LOSS, 1e3, check=False)
        for backend in ("engine", "torch")
    ]
    assert all(int(answer.status) != 0 for answer in answers)
