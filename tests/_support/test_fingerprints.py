"""Two things that give other numbers have other fingerprints, in every process the same."""

import functools
import importlib.util
import linecache
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from fingerprinted import MDP, PAIRS, Holder

import torch_occ as occ
from torch_occ._support.fingerprints import (
    UnhashableError,
    differences,
    fingerprint,
    fingerprints,
)

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.mark.parametrize("name", PAIRS)
def test_what_differs_has_another_fingerprint_and_what_does_not_has_the_same(name):
    one, other = PAIRS[name]
    assert fingerprint(part=one()) == fingerprint(part=one())
    assert fingerprint(part=one()) != fingerprint(part=other())


def test_fingerprints_are_the_same_in_another_process():
    script = (
        "from fingerprinted import PAIRS\n"
        "from torch_occ._support.fingerprints import fingerprint\n"
        "for name in PAIRS:\n"
        "    print(name, fingerprint(part=PAIRS[name][0]()))"
    )
    places = os.pathsep.join([str(HELPERS), str(HELPERS.parents[1])])
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert found == [f"{name} {fingerprint(part=PAIRS[name][0]())}" for name in PAIRS]


UNHASHABLE = {
    "a lock": threading.Lock,
    "an open file": lambda: Path(__file__).open(),  # noqa: SIM115  (closed by the test)
    "a generator": lambda: (x for x in ()),
}


@pytest.mark.parametrize("name", UNHASHABLE)
def test_what_cannot_be_hashed_is_refused_with_the_way_to_it(name):
    thing = UNHASHABLE[name]()
    with pytest.raises(UnhashableError, match=r"^learner\.inner\['a'\]\[1\]: a \w+ cannot be"):
        fingerprint(learner=Holder(inner={"a": [1, thing]}))
    getattr(thing, "close", int)()


def test_neither_caches_nor_ignored_attributes_count():
    class Own:
        fingerprint_ignores = ("count",)
        count = 0

        @functools.cached_property
        def table(self):
            return np.zeros(3)

    class Derived(Own):
        pass

    for kind in (Own, Derived):
        one, other = kind(), kind()
        other.count, _ = 3, other.table
        assert "table" in vars(other)
        assert fingerprint(part=one) == fingerprint(part=other)
        other.new = 1
        assert fingerprint(part=one) != fingerprint(part=other)


CODE = {
    "classes": "class made:\n    def rule(self, m):\n        return {} * m\n",
    "attributes of a class": "class made:\n    scale = {}\n",
    "bases of a class": "class a:\n    x = {}\n\n\nclass made(a):\n    pass\n",
    "functions": "def made(m):\n    return [x + {} for x in m]\n",
    "lambdas": "made = lambda m: {} * m\n",
    "methods": "class kind:\n    def f(self):\n        return {}\n\n\nmade = kind().f\n",
}


@pytest.mark.parametrize("name", CODE)
def test_code_of_a_user_counts_with_its_source(name, tmp_path, monkeypatch):
    path, found = tmp_path / "mine.py", []
    for text in ("2", "2", "3"):
        path.write_text(CODE[name].format(text), encoding="utf-8")
        linecache.clearcache()
        spec = importlib.util.spec_from_file_location("mine", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "mine", module)
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
        found.append(fingerprint(part=module.made))
    assert found[0] == found[1] != found[2]


def test_the_version_of_the_package_counts(monkeypatch):
    before = fingerprint(part=1)
    monkeypatch.setattr(sys.modules["torch_occ._support.fingerprints"], "VERSION", "0.0.1")
    assert fingerprint(part=1) != before


def test_parts_that_differ_are_named():
    one, other = fingerprints(a=1, b=2, c=3), fingerprints(a=1, b=3, d=4)
    assert differences(one, other) == ["b", "d", "c"]
    assert differences(one, one) == []
    assert differences(None, one) == ["a", "b", "c"]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_learner_that_has_played_is_still_the_same(sparse):
    mdp = MDP.to_sparse() if sparse else MDP
    learner = occ.FTRL(mdp, occ.jin_luo(mdp), occ.ReducedVariance(occ.InverseSqrt(1.0)))
    before = fingerprint(learner=learner, mdp=mdp)
    occ.simulate(mdp, learner, occ.GreedyAdversary(), 3, backend="engine")
    learner.step(torch.zeros(mdp.num_states, mdp.num_actions, dtype=torch.float64), t=3)
    assert fingerprint(learner=learner, mdp=mdp) == before


class Shifted(occ.BernoulliLosses):
    """A user's process that holds a function."""

    def __init__(self, mean, transform):
        super().__init__(mean)
        self.transform = transform

    def means(self, mdp, state, t0, n, q):
        return self.transform(self.mean)[None, None], state


def test_a_run_is_not_continued_with_another_function(tmp_path):
    """As it was found: a run saved with `lambda m: m` and reopened with `lambda m: 1 - m`."""
    mean = torch.full((MDP.num_states, MDP.num_actions), 0.2, dtype=torch.float64)

    def play(transform):
        losses = Shifted(mean, transform)
        return occ.simulate(MDP, occ.FollowTheLeader(MDP), losses, 5, save_to=tmp_path / "run")

    play(lambda m: m)
    with pytest.raises(ValueError, match=r"belongs to another run, .* the same losses; name"):
        play(lambda m: 1 - m)


def test_a_number_from_the_middle_of_a_tensor():
    """Its stride is that of the tensor, though it has one entry only."""
    table = torch.arange(33, dtype=torch.float64).reshape(3, 11)
    assert fingerprints(x=table[:1, 4]) == fingerprints(x=torch.tensor([4.0], dtype=torch.float64))
