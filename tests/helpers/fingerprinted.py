"""Pairs of things that give other numbers. Another process imports it, so it stands by itself."""

import enum
from dataclasses import dataclass

import numpy as np
import torch
from zoo import PROBLEMS

import torch_occ as occ

MDP = PROBLEMS["masked"]().mdp


class Holder:
    """An object of the user."""

    def __init__(self, **held):
        self.__dict__.update(held)


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Point:
    x: float
    label: str = "here"


def array(change=0.0):
    found = np.linspace(0, 1, 2000)
    found[1000] += change
    return found


def closure(value):
    return lambda m: m * value


def cycle(value):
    first, second = Holder(value=value), Holder()
    first.other, second.other = second, first
    return first


def hooked(scale):
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    module.register_forward_hook(closure(scale))
    return module


def buffered(value):
    module = torch.nn.Module()
    module.register_buffer("kept", torch.tensor(value))
    return module


def private(value):
    module = torch.nn.Module()
    module._scale = value
    return module


def generator(seed):
    return torch.Generator().manual_seed(seed)


def learner(power):
    psi = 2.0 * occ.jin_luo(MDP) + occ.Tsallis(power) / occ.Polynomial(1.0, 0.5)
    return occ.FTRL(MDP, psi, occ.ReducedVariance(occ.InverseSqrt(1.0)))


# Pairs of builders of different things; each is also built twice, and must be the same.
PAIRS = {
    "the shape of a tensor": (lambda: torch.zeros(2, 3), lambda: torch.zeros(3, 2)),
    "the type of a tensor": (lambda: torch.zeros(2).double(), lambda: torch.zeros(2).long()),
    "functions by name": (lambda: Holder(f=closure), lambda: Holder(f=cycle)),
    "arrays that differ in the middle": (array, lambda: array(1e-10)),
    "arrays of another shape": (array, lambda: array().reshape(40, 50)),
    "NumPy scalars": (lambda: np.float64(0.1), lambda: np.float64(0.1 + 2e-17)),
    "closures": (lambda: closure(1), lambda: closure(2)),
    "bound methods": (lambda: Holder(x=1).__eq__, lambda: Holder(x=2).__eq__),
    "enumerations": (lambda: Colour.RED, lambda: Colour.BLUE),
    "numbers and text": (lambda: 1, lambda: "1"),
    "whole numbers": (lambda: 1, lambda: 1.0),
    "zeros": (lambda: 0.0, lambda: -0.0),
    "dataclasses": (lambda: Point(1.0), lambda: Point(1.0, "there")),
    "slots": (lambda: Slots(1), lambda: Slots(2)),
    "cycles": (lambda: cycle(1), lambda: cycle(2)),
    "lists and tuples": (lambda: [1, 2], lambda: (1, 2)),
    "runs of text": (lambda: ["ab", "c"], lambda: ["a", "bc"]),
    "sets": (lambda: {"a", "b", "c"}, lambda: {"a", "b", "d"}),
    "tensors": (lambda: torch.tensor(1.0), lambda: torch.tensor(1.0 + 1e-7)),
    "types of tensors": (lambda: torch.zeros(2), lambda: torch.zeros(2, dtype=torch.float64)),
    "conjugates": (lambda: torch.tensor([1j]), lambda: torch.tensor([1j]).conj()),
    "sparse tensors": (
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).roll(1, 0).to_sparse(),
    ),
    "generators": (lambda: generator(1), lambda: generator(2)),
    "NumPy's generators": (lambda: np.random.default_rng(1), lambda: np.random.default_rng(2)),
    "buffers": (lambda: buffered(1.0), lambda: buffered(2.0)),
    "private attributes of modules": (lambda: private(1.0), lambda: private(2.0)),
    "hooks": (lambda: hooked(1.0), lambda: hooked(2.0)),
    "training": (lambda: torch.nn.Dropout().train(), lambda: torch.nn.Dropout().eval()),
    "losses": (occ.RandomWalkLosses, lambda: occ.RandomWalkLosses(0.02)),
    "learners": (lambda: learner(0.4), lambda: learner(0.3)),
    "MDPs": (lambda: MDP, lambda: PROBLEMS["contexts"]().mdp),
}
