"""The learner that CONTRIBUTING.md adds, built from that page, compiled, beside its torch form."""

import importlib.util
import re

import pytest
import torch
from documents import ROOT
from zoo import random_loss

import torch_occ as occ


@pytest.fixture(scope="module")
def contributed(tmp_path_factory):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^## Add a learner\n.*?^```python\n(.*?)^```$", text, re.M | re.S)
    assert len(code.splitlines()) <= 80
    path = tmp_path_factory.mktemp("contributed") / "explore_first.py"
    path.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("explore_first", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("width", [3, 30])
def test_both_backends_play_the_same_game(contributed, width):
    """In lanes, and in plain arrays where layers are wide."""
    mdp = occ.LayeredMDP.random(2, width, 3, seed=0)
    losses, seeds = occ.BernoulliLosses(random_loss(mdp, seed=1)), range(3)
    learner = contributed.ExploreFirst(mdp, explore=60)
    found, expected = (
        occ.simulate(mdp, learner, losses, 300, seeds, backend=backend)
        for backend in ("auto", "torch")
    )
    assert (found.backend, expected.backend) == ("engine", "torch")
    for name in ("regret", "realised_regret", "cumulative_occupancy"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))


def test_a_field_that_nothing_fills_is_named(contributed):
    class Incomplete(contributed.ExploreFirst):
        compiled = contributed.CompiledExploreFirst

        def __init__(self, mdp):
            super().__init__(mdp, 5)
            del self.explore

    mdp = occ.LayeredMDP.random(2, 3, 3, seed=0)
    losses = occ.BernoulliLosses(random_loss(mdp, seed=1))
    with pytest.raises(TypeError, match=r"CompiledExploreFirst.explore: neither the state of Inc"):
        occ.simulate(mdp, Incomplete(mdp), losses, 10, backend="engine")
