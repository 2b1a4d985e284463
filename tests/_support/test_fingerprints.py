"""Two things that give other numbers have other fingerprints, in every process the same."""

import functools
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
from torch_occ._support.fingerprints import UnhashableError, fingerprints

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.mark.parametrize("name", PAIRS)
def test_what_differs_has_another_fingerprint_and_what_does_not_has_the_same(name):
    one, other = PAIRS[name]
    assert fingerprints(part=one()) == fingerprints(part=one())
    assert fingerprints(part=one()) != fingerprints(part=other())


def test_fingerprints_are_the_same_in_another_process():
    script = (
        "from fingerprinted import PAIRS\n"
        "from torch_occ._support.fingerprints import fingerprints\n"
        "print({name: fingerprints(part=PAIRS[name][0]()) for name in PAIRS})"
    )
    places = os.pathsep.join([str(HELPERS), str(HELPERS.parents[1])])
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert found == str({name: fingerprints(part=PAIRS[name][0]()) for name in PAIRS})


UNHASHABLE = {
    "a lock": threading.Lock,
    "an open file": lambda: Path(__file__).open(),  # noqa: SIM115  (closed by the test)
    "a generator": lambda: (x for x in ()),
}


@pytest.mark.parametrize("name", UNHASHABLE)
def test_what_cannot_be_hashed_is_refused_with_the_way_to_it(name):
    thing = UNHASHABLE[name]()
    with pytest.raises(UnhashableError, match=r"^learner\.inner\['a'\]\[1\]: a \w+ cannot be"):
        fingerprints(learner=Holder(inner={"a": [1, thing]}))
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
        assert fingerprints(part=one) == fingerprints(part=other)
        other.new = 1
        assert fingerprints(part=one) != fingerprints(part=other)


def test_the_version_of_the_package_counts(monkeypatch):
    before = fingerprints(part=1)
    monkeypatch.setattr(sys.modules["torch_occ._support.fingerprints"], "VERSION", "0.0.1")
    assert fingerprints(part=1) != before


@pytest.mark.parametrize("sparse", [False, True])
def test_a_learner_that_has_played_is_still_the_same(sparse):
    mdp = MDP.to_sparse() if sparse else MDP
    learner = occ.FTRL(mdp, occ.jin_luo(mdp), occ.ReducedVariance(occ.InverseSqrt(1.0)))
    before = fingerprints(learner=learner, mdp=mdp)
    occ.simulate(mdp, learner, occ.GreedyAdversary(), 3, backend="engine")
    learner.step(torch.zeros(mdp.num_states, mdp.num_actions, dtype=torch.float64), t=3)
    assert fingerprints(learner=learner, mdp=mdp) == before


def test_a_number_from_the_middle_of_a_tensor():
    """Its stride is that of the tensor, though it has one entry only."""
    table = torch.arange(33, dtype=torch.float64).reshape(3, 11)
    assert fingerprints(x=table[:1, 4]) == fingerprints(x=torch.tensor([4.0], dtype=torch.float64))
