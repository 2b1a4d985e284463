"""Files are written whole or not at all, and a run is saved with what it belongs to."""

import os

import pytest
from games import MDP, Interruptible, walk

import torch_occ as occ
from torch_occ._support.files import write_atomically
from torch_occ.game.simulate import simulate


def full_disk(*_):
    raise OSError(28, "No space left on device")


def interrupted(file):
    file.write(b"half")
    raise KeyboardInterrupt


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "runs" / "deep" / "file"
    write_atomically(path, lambda file: file.write(b"old"))  # creates the directories
    write_atomically(str(path), lambda file: file.write(b"older"))
    write_atomically(path, lambda file: file.write(b"new"), rehearse=True)
    for write in (interrupted, full_disk):
        with pytest.raises((KeyboardInterrupt, OSError)):
            write_atomically(path, write)
    for function in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, full_disk)
            with pytest.raises(OSError, match=r"No space left.*nothing .* is lost.*deep/file"):
                write_atomically(path, lambda file: file.write(b"new"))
    with pytest.raises(OSError, match="file"):  # the parent is a file
        write_atomically(path / "below", lambda file: file.write(b"new"))
    assert path.read_bytes() == b"older"
    assert os.listdir(path.parent) == ["file"]  # and no litter


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
    options = {"episodes": 256, "seeds": range(16), "checkpoints": [256]}
    save(tmp_path / "run", losses=occ.RandomWalkLosses(), **options)
    # A position of 16 * 8 numbers has 1 kB, a whole chunk 262 kB.
    assert (tmp_path / "run").stat().st_size < 45_000
