import os
import subprocess
import sys
from pathlib import Path

import pytest
from games import MDP, Interruptible, walk

import torch_occ as occ
from torch_occ._support.files import write_atomically
from torch_occ.game.simulate import Simulation, simulate


def test_creates_missing_directories(tmp_path):
    path = tmp_path / "runs" / "deep" / "file"
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["file"]


def test_replaces_and_accepts_strings(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    write_atomically(str(path), lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"


def full_disk(*_):
    raise OSError(28, "No space left on device")


def interrupted(file):
    file.write(b"half")
    raise KeyboardInterrupt


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_full_disk_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch, function):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, function, full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_from_a_full_disk_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(tmp_path / "file", lambda file: file.write(b"new"))
    assert str(tmp_path / "file") in str(caught.value)


@pytest.mark.parametrize("write", [interrupted, full_disk])
def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, write):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises((KeyboardInterrupt, OSError)):
        write_atomically(path, write)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_parent_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(OSError, match="file"):
        write_atomically(tmp_path / "file" / "below", lambda file: file.write(b"new"))
    assert (tmp_path / "file").read_bytes() == b"old"


def test_others_may_read_the_file_as_far_as_the_umask_allows(tmp_path):
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "file", lambda file: file.write(b"new"))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


# -- the file of a run -------------------------------------------------------------------------


def save(path, learner=None, losses=None, **options):
    return simulate(
        MDP,
        learner or Interruptible(MDP),
        losses or walk(),
        **{"episodes": 10, "seeds": (1, 2), "save_to": path} | options,
    )


class Own(occ.SeparableRegularizer):
    """A user's regularizer with a plain number in it."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def pair(self, x):
        return self.scale * x * x.log()


OTHERS = {
    "seeds": ({}, {"seeds": (1, 3)}),
    "checkpoints": ({}, {"checkpoints": [10]}),
    "losses": ({}, {"losses": occ.Corrupted(occ.RandomWalkLosses(0.2, "bernoulli"), 30.0)}),
    "class": ({}, {"learner": occ.FollowTheLeader(MDP)}),
    "gamma": ({"learner": occ.FTRL.tsallis(MDP, 1.0)}, {"learner": occ.FTRL.tsallis(MDP, 1.1)}),
    "attribute": ({"learner": occ.FTRL(MDP, Own(1.0))}, {"learner": occ.FTRL(MDP, Own(2.0))}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_configuration_is_refused(name, tmp_path):
    path, (first, second) = tmp_path / "run", OTHERS[name]
    save(path, backend="torch", **first)
    before = path.read_bytes()
    part = "learner" if name in ("class", "gamma", "attribute") else name
    with pytest.raises(ValueError, match=f"run: belongs to another run, .* the same {part}; name"):
        save(path, backend="torch", **second)
    assert path.read_bytes() == before


class Counting(occ.FixedPolicy):
    """A user's learner that counts for itself, outside its state."""

    count = 0

    def propose(self, t):
        self.count += 1
        return super().propose(t)


def test_a_learner_may_have_attributes_that_change(tmp_path):
    save(tmp_path / "run", Counting(MDP))
    save(tmp_path / "run", Counting(MDP))


def test_a_checkpoint_holds_no_more_than_it_needs(tmp_path):
    save(
        tmp_path / "run",
        losses=occ.RandomWalkLosses(),
        episodes=256,
        seeds=range(16),
        checkpoints=[256],
    )
    assert (
        tmp_path / "run"
    ).stat().st_size < 40_000  # a position of 16 * 8 numbers is 1 kB, a whole chunk 262 kB


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_the_fingerprint_is_the_same_in_every_process(hash_seed, tmp_path):
    """Neither Python's hash seed nor a filled cache changes the fingerprint of a run."""
    script = (
        "import torch_occ as occ; from torch_occ.game.simulate import Simulation; mdp = "
        "occ.LayeredMDP.random(2, 2, 2); learner = occ.FTRL(mdp, 2.0 * occ.jin_luo(mdp) + "
        "occ.Tsallis(0.4) / occ.Polynomial(1.0, 0.5)); print(Simulation(mdp, learner, "
        "occ.RandomWalkLosses(), 10, [0], None, {}, 'torch').fingerprints)"
    )
    environment = os.environ | {
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": str(Path(occ.__file__).parents[1]),
    }
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    mdp = occ.LayeredMDP.random(2, 2, 2)
    learner = occ.FTRL(mdp, 2.0 * occ.jin_luo(mdp) + occ.Tsallis(0.4) / occ.Polynomial(1.0, 0.5))
    learner.start(1)
    learner.propose(1)
    run = Simulation(mdp, learner, occ.RandomWalkLosses(), 10, [0], None, {}, "torch")
    assert str(run.fingerprints) == found
