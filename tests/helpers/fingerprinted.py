"""Pairs of things that give other numbers. Another process imports it, so it stands by itself."""

import enum
import functools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from zoo import PROBLEMS

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


def made_in(module):
    """A function as if it stood in this module."""
    space = {"__name__": module}
    exec("def made():\n    pass\n", space)
    return space["made"]


def array(change=0.0, at=1000):
    found = np.linspace(0, 1, 2000)
    found[at] += change
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


# Pairs of builders of different things; each is also built twice, and must be the same.
PAIRS = {
    "lambdas of an object": (
        lambda: Holder(f=lambda m: m),
        lambda: Holder(f=lambda m: 1 - m),
    ),
    "arrays that differ in the middle": (array, lambda: array(0.5)),
    "arrays that differ by 1e-10": (array, lambda: array(1e-10, 3)),
    "arrays of another type": (array, lambda: array().astype(np.float32)),
    "arrays of another shape": (array, lambda: array().reshape(40, 50)),
    "arrays of objects": (lambda: np.array([1, None]), lambda: np.array([2, None])),
    "masked arrays": (
        lambda: np.ma.array([1, 2], mask=[0, 1]),
        lambda: np.ma.array([1, 2], mask=[1, 0]),
    ),
    "NumPy scalars": (lambda: np.float64(0.1), lambda: np.float64(0.1 + 2e-17)),
    "types of NumPy scalars": (lambda: np.float64(1), lambda: np.float32(1)),
    "closures": (lambda: closure(1), lambda: closure(2)),
    "modules of code": (lambda: made_in("a"), lambda: made_in("b")),
    "partial functions": (
        lambda: functools.partial(max, 1, key=abs),
        lambda: functools.partial(max, 2, key=abs),
    ),
    "bound methods": (lambda: Holder(x=1).__eq__, lambda: Holder(x=2).__eq__),
    "methods of an object": (lambda: Point(1.0).__repr__, lambda: Point(2.0).__repr__),
    "enumerations": (lambda: Colour.RED, lambda: Colour.BLUE),
    "paths": (lambda: Path("a"), lambda: Path("b")),
    "truth values": (lambda: True, lambda: False),
    "truth and one": (lambda: True, lambda: 1),
    "None and its name": (lambda: None, lambda: "None"),
    "numbers and text": (lambda: 1, lambda: "1"),
    "whole numbers": (lambda: 1, lambda: 1.0),
    "zeros": (lambda: 0.0, lambda: -0.0),
    "complex numbers": (lambda: 1j, lambda: 2j),
    "fractions": (lambda: Fraction(1, 3), lambda: Fraction(2, 3)),
    "bytes": (lambda: b"a", lambda: bytearray(b"a")),
    "ranges": (lambda: range(3), lambda: range(4)),
    "slices": (lambda: slice(3), lambda: slice(4)),
    "dataclasses": (lambda: Point(1.0), lambda: Point(1.0, "there")),
    "slots": (lambda: Slots(1), lambda: Slots(2)),
    "cycles": (lambda: cycle(1), lambda: cycle(2)),
    "lists and tuples": (lambda: [1, 2], lambda: (1, 2)),
    "nesting": (lambda: [[1], 2], lambda: [[1, 2]]),
    "runs of text": (lambda: ["ab", "c"], lambda: ["a", "bc"]),
    "dictionaries": (lambda: {"a": 1, 2: "b"}, lambda: {"a": 1, 2: "c"}),
    "sets": (lambda: {"a", "b", "c"}, lambda: {"a", "b", "d"}),
    "counters": (lambda: Counter("aab"), lambda: Counter("abb")),
    "queues": (lambda: deque([1, 2], 3), lambda: deque([1, 2], 4)),
    "default dictionaries": (lambda: defaultdict(int), lambda: defaultdict(float)),
    "ordered dictionaries": (lambda: OrderedDict(a=1), lambda: OrderedDict(a=2)),
    "tensors": (lambda: torch.tensor(1.0), lambda: torch.tensor(1.0 + 1e-7)),
    "types of tensors": (lambda: torch.zeros(2), lambda: torch.zeros(2, dtype=torch.float64)),
    "short tensors": (
        lambda: torch.ones(2, dtype=torch.bfloat16),
        lambda: torch.zeros(2, dtype=torch.bfloat16),
    ),
    "conjugates": (lambda: torch.tensor([1j]), lambda: torch.tensor([1j]).conj()),
    "sparse tensors": (
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).roll(1, 0).to_sparse(),
    ),
    "compressed tensors": (
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.eye(3).roll(1, 0).to_sparse_csr(),
    ),
    "generators": (lambda: generator(1), lambda: generator(2)),
    "NumPy's generators": (lambda: np.random.default_rng(1), lambda: np.random.default_rng(2)),
    "Python's generators": (lambda: random.Random(1), lambda: random.Random(2)),
    "buffers": (lambda: buffered(1.0), lambda: buffered(2.0)),
    "private attributes of modules": (lambda: private(1.0), lambda: private(2.0)),
    "hooks": (lambda: hooked(1.0), lambda: hooked(2.0)),
    "training": (lambda: torch.nn.Dropout().train(), lambda: torch.nn.Dropout().eval()),
    "MDPs": (lambda: MDP, lambda: PROBLEMS["contexts"]().mdp),
    "sparse MDPs": (lambda: MDP.to_sparse(), lambda: PROBLEMS["contexts"]().mdp.to_sparse()),
}
