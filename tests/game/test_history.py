import signal
import subprocess
import sys

import pytest
import torch
from games import MDP, Interruptible, same, walk
from zoo import random_loss

import torch_occ as occ
from torch_occ.game.simulate import simulate


@pytest.fixture
def history():
    losses = occ.Corrupted(occ.BernoulliLosses(random_loss(MDP)), 3.0)
    config = {"name": "α", "numbers": [1, 2.5, None], "nested": {"flag": True}}
    return occ.simulate(
        MDP, occ.FTRL(MDP, occ.jin_luo(MDP)), losses, 12, (4, 2), config=config, backend="torch"
    )


def test_final_is_the_mean_over_seeds(history):
    regret = history.regret[:, -1]
    assert history.final() == (
        pytest.approx(float(regret.mean())),
        pytest.approx(float(regret.std()) / 2**0.5),
        2,
    )
    assert history.final("corruption").mean == pytest.approx(
        float(history.corruption[:, -1].mean())
    )
    with pytest.raises(ValueError, match=r"curve: expected one of \['regret', .* got 'regrets'"):
        history.final("regrets")


def test_prints_as_a_short_table(history):
    lines = repr(history).splitlines()
    assert lines[0] == "History: 2 seeds, 12 episodes, played by torch"
    assert [line.split("|")[1].strip() for line in lines[3:]] == ["1", "10", "12"]
    assert str(history.final()) in lines[-1]


def test_round_trip(history, tmp_path):
    history.save(tmp_path / "deep" / "history.npz")
    again = occ.History.load(tmp_path / "deep" / "history.npz")
    same(history, again)
    again.regret[1, 2] += 1e-3
    with pytest.raises(AssertionError, match=r"index \(1, 2\)(.|\n)*'regret'"):
        torch.testing.assert_close(again.curves, history.curves)
    assert history.cumulative_occupancy.shape == (2, 4, 2)
    assert float(history.dual_residual.max()) < 1e-10
    assert bool((history.wall_time.diff() >= 0).all())


# -- interruption ------------------------------------------------------------------------------


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("t", [1, 20])
@pytest.mark.bits
def test_ctrl_c_is_raised_with_what_there_is(at, t):
    whole = simulate(MDP, Interruptible(MDP), walk(), 20, (0, 1))
    at(t, interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        simulate(MDP, Interruptible(MDP), walk(), 20, (0, 1))
    history = caught.value.result
    assert caught.value.saved_to is None
    assert not history.finished
    assert history.episodes.tolist() == [point for point in whole.episodes.tolist() if point < t]
    assert torch.equal(history.regret, whole.regret[:, : len(history.episodes)])
    assert history.regret.dtype == torch.float64


SCRIPT = """
import os, signal, sys
sys.path[:0] = sys.argv[2:]
from games import MDP, Interruptible, walk
from torch_occ.game.simulate import simulate
Interruptible.calls = {300: lambda: os.kill(os.getpid(), signal.SIGKILL)}
simulate(MDP, Interruptible(MDP), walk(), 320, (1, 2), save_to=sys.argv[1], save_every=0.0)
"""


@pytest.mark.bits
def test_a_killed_run_continues_exactly(tmp_path, at):
    path = tmp_path / "run"
    command = [sys.executable, "-c", SCRIPT, str(path), *sys.path]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    whole = simulate(MDP, Interruptible(MDP), walk(), 320, (1, 2))
    at(256, interrupt)  # it must not play any episode again
    same(whole, simulate(MDP, Interruptible(MDP), walk(), 320, (1, 2), save_to=path))
