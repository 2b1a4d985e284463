import os
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


def test_shapes(history):
    points = len(history.episodes)
    for name in (
        "regret",
        "realised_regret",
        "comparator",
        "corruption",
        "newton_steps",
        "dual_residual",
        "flow_residual",
        "uncertified",
    ):
        assert getattr(history, name).shape == (2, points), name
        assert getattr(history, name).dtype == torch.float64, name
    for name in ("cumulative_occupancy", "total_mean", "last_q"):
        assert getattr(history, name).shape == (2, 4, 2), name
    assert history.wall_time.shape == (points,)
    assert history.episodes.tolist()[-1] == 12
    assert history.seeds == (4, 2)
    assert history.finished
    assert bool((history.newton_steps >= 1).all())
    assert float(history.dual_residual.max()) < 1e-10
    assert bool((history.wall_time.diff() >= 0).all())


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


def test_a_data_frame_has_a_row_for_each_seed_and_checkpoint(history):
    frame = history.to_dataframe()
    assert len(frame) == 2 * len(history.episodes)
    assert set(frame.columns) >= {"seed", "episode", "regret", "realised_regret", "uncertified"}
    last = frame[(frame.seed == 2) & (frame.episode == 12)]
    assert last.regret.item() == float(history.regret[1, -1])


@pytest.mark.parametrize("name", ["history.npz", "runs/deep/history"])
def test_round_trip(history, tmp_path, name):
    history.save(tmp_path / name)
    same(history, occ.History.load(tmp_path / name))
    assert os.listdir((tmp_path / name).parent) == [(tmp_path / name).name]


def test_a_failed_save_leaves_the_old_file(history, tmp_path, monkeypatch):
    path = tmp_path / "history.npz"
    history.save(path)

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        history.save(path)
    history.config = {"object": object()}
    with pytest.raises(TypeError):
        history.save(path)
    assert occ.History.load(path).config["name"] == "α"
    assert os.listdir(tmp_path) == ["history.npz"]


def test_a_config_that_json_cannot_hold_is_refused_before_the_run():
    with pytest.raises((TypeError, ValueError), match=r"config|JSON"):
        occ.simulate(
            MDP,
            occ.FixedPolicy(MDP),
            occ.GreedyAdversary(),
            2,
            config={"device": torch.device("cpu")},
        )


# -- interruption ------------------------------------------------------------------------------


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("t", [1, 5, 20])
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


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "build",
    [lambda: occ.FTRL(MDP, occ.jin_luo(MDP)), lambda: occ.FollowTheLeader(MDP)],
    ids=["ftrl", "leader"],
)
@pytest.mark.bits
def test_a_run_that_broke_off_continues_exactly(build, tmp_path):
    class Crash(occ.Callback):
        def on_chunk(self, run):
            if run.t == 24:
                raise RuntimeError("crash")

    arguments = {
        "episodes": 30,
        "seeds": (1, 2),
        "backend": "torch",
        "save_to": tmp_path / "run",
        "save_every": 0.0,
    }
    with pytest.raises(RuntimeError, match="crash"):
        simulate(MDP, build(), walk(), callbacks=[Crash()], **arguments)
    whole = simulate(MDP, build(), walk(), **arguments | {"save_to": None})
    same(whole, simulate(MDP, build(), walk(), **arguments))
    same(whole, simulate(MDP, build(), walk(), **arguments))  # and once more, from its end


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.bits
def test_a_finished_run_is_lengthened_exactly_or_not_at_all(tmp_path):
    arguments = {"seeds": (1,), "checkpoints": [5, 10]}
    simulate(MDP, occ.FollowTheLeader(MDP), walk(), 12, save_to=tmp_path / "run", **arguments)
    whole = simulate(MDP, occ.FollowTheLeader(MDP), walk(), 30, **arguments)
    try:
        longer = simulate(
            MDP, occ.FollowTheLeader(MDP), walk(), 30, save_to=tmp_path / "run", **arguments
        )
    except ValueError:
        return
    same(whole, longer)


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
