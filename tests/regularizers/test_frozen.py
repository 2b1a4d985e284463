"""The structure of a step cannot change, and all other features of nn.Module still work."""

import copy

import pytest
import torch
from torch.func import functional_call
from zoo import PROBLEMS, expect, random_loss

import torch_occ as occ
from torch_occ.regularizers.base import TabularRegularizer
from torch_occ.regularizers.terms import Log, Power, Term

MDP = PROBLEMS["masked"]().mdp
LOSS = random_loss(MDP, seed=5)


@pytest.fixture(params=["auto", "torch"])
def step(request):
    made = occ.FTRLStep(MDP, occ.jin_luo(MDP, beta=0.5), backend=request.param)
    made(LOSS, 3.0)
    return made


TERMS = {  # changes of the list of terms
    "a term": lambda terms: terms.__setitem__(1, occ.LogBarrier(3.0)),
    "one more": lambda terms: terms.append(occ.LogBarrier()),
    "several more": lambda terms: terms.extend([occ.LogBarrier()]),
    "one more by +=": lambda terms: terms.__iadd__([occ.LogBarrier()]),
    "one more in front": lambda terms: terms.insert(0, occ.LogBarrier()),
    "one less": lambda terms: terms.__delitem__(1),
    "the last": lambda terms: terms.pop(1),
    "by its name": lambda terms: setattr(terms, "1", occ.LogBarrier()),
    "a module by its name": lambda terms: terms.add_module("1", occ.LogBarrier()),
    "a factor": lambda terms: setattr(terms[0], "factor", 5.0),
    "a schedule": lambda terms: setattr(terms[0], "factor", occ.Constant(5.0)),
    "a power": lambda terms: setattr(terms[0], "power", 1),
    "what is scaled": lambda terms: setattr(terms[0], "regularizer", occ.Shannon()),
}
CHANGES = {name: (lambda step, x=x: x(step.regularizer.terms)) for name, x in TERMS.items()} | {
    "all terms": lambda step: setattr(step.regularizer, "terms", [occ.LogBarrier()]),
    "no terms": lambda step: delattr(step.regularizer, "terms"),
    "the mdp": lambda step: setattr(step, "mdp", PROBLEMS["contexts"]().mdp),
    "the regularizer": lambda step: setattr(step, "regularizer", occ.Shannon()),
    "the options": lambda step: setattr(step, "options", None),
    "the backend": lambda step: setattr(step, "backend", "engine"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_structure_is_refused(name, step):
    before, q = str(step), step(LOSS, 3.0)
    with pytest.raises(AttributeError, match=r"cannot be changed; .*(make a new|step\.use)"):
        CHANGES[name](step)
    assert str(step) == before
    assert torch.equal(step(LOSS, 3.0), q)


def test_values_of_parameters_are_followed(step):
    fresh = occ.FTRLStep(MDP, occ.jin_luo(MDP, beta=3.0), backend=step.backend)
    values = fresh.state_dict()
    names = ("terms.0.regularizer.alpha", "terms.0.factor.gamma", "terms.1.beta")
    assert set(values) == {f"regularizer.{name}" for name in names}
    expected = fresh(LOSS, 3.0)
    assert float((expected - step(LOSS, 3.0)).detach().abs().max()) > 1e-3
    found = [functional_call(step, values, (LOSS, 3.0))]
    loaded, assigned, replaced = (copy.deepcopy(step) for _ in range(3))
    loaded.load_state_dict(values)
    assigned.load_state_dict(values, assign=True)
    replaced.regularizer.terms[1].beta = torch.nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
    with torch.no_grad():
        step.regularizer.terms[1].beta.fill_(3.0)
    for q in (*found, *(each(LOSS, 3.0) for each in (loaded, assigned, replaced, step))):
        torch.testing.assert_close(q, expected, rtol=1e-10, atol=0)


class Moody(TabularRegularizer):
    """A user's table that says something else when it is told to."""

    kind = Log()

    def table(self):
        return (Term("pair", Power(0.5), -1.0), Term("pair", self.kind, -0.5))


class Both(occ.Regularizer):
    """A user's own sum, of as many parts as it has at the moment."""

    def __init__(self, *parts):
        super().__init__()
        self.all = list(parts)

    def parts(self):
        for part in self.all:
            yield from part.parts()


class Squares(occ.StatewiseRegularizer):
    def per_state(self, q_s):
        return q_s.square().sum(-1)


@pytest.mark.parametrize("backend", ["engine", "torch"])
def test_a_table_or_a_part_that_changes_is_noticed(backend):
    table, total = Moody(), Both(occ.Shannon())
    steps = [occ.FTRLStep(MDP, psi, backend=backend) for psi in (table, total)]
    for step in steps:
        step(LOSS)
    table.kind = Power(0.25)
    total.all.append(Squares())
    for step, message in zip(steps, ("its terms were", "Squares was added"), strict=True):
        with expect(message, "make a new FTRLStep", error=RuntimeError):
            step(LOSS)
