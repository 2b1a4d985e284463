"""Runs that are interrupted, disks that are full, files that are damaged: no work gets lost."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from games import MDP, Interruptible, same, walk
from threads import THREADS
from zoo import random_loss

import torch_occ as occ
from torch_occ._support.files import read_checked, write_checked

TESTS = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(TESTS / "helpers"), str(TESTS.parent)]),
    "OMP_NUM_THREADS": "1",
}


def run(path, episodes=600, **options):
    arguments = {"seeds": (1, 2), "save_to": path} | options
    return occ.simulate(MDP, Interruptible(MDP), walk(), episodes, **arguments)


def interrupt():
    raise KeyboardInterrupt


# -- interrupted -------------------------------------------------------------------------------


def test_what_is_played_before_ctrl_c_is_saved(tmp_path, at):
    whole = run(None)
    at(530, interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(tmp_path / "run")
    assert caught.value.saved_to == tmp_path / "run"
    assert caught.value.result.episodes[-1] == 501
    assert not caught.value.result.finished
    assert ", not finished" in repr(caught.value.result)
    (note,) = caught.value.__notes__
    where = f"saved to {tmp_path / 'run'}; the same call continues"
    assert note == f"torch_occ: stopped at episode 530 of 600; {where}"
    at(512, interrupt)  # it must not play any of these again
    same(whole, run(tmp_path / "run"))


def test_the_tables_of_an_interrupted_history_belong_to_its_last_checkpoint(at):
    short = run(None, 501, checkpoints=[501])
    at(530, interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(None, checkpoints=[501, 600])
    for name in ("cumulative_occupancy", "total_mean", "last_q", "regret"):
        assert torch.equal(getattr(caught.value.result, name), getattr(short, name)), name


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_every_exception_leaves_the_last_edge_in_the_file(tmp_path, at, error):
    def stop():
        raise error("here")

    whole = run(None)
    at(530, stop)
    with pytest.raises(error, match="here"):
        run(tmp_path / "run")
    at(512, interrupt)
    same(whole, run(tmp_path / "run"))


def test_ctrl_c_before_the_first_edge_saves_nothing_and_says_so(tmp_path, at):
    at(1, interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(tmp_path / "run")
    assert caught.value.saved_to is None
    assert caught.value.result.regret.shape == (2, 0)  # no checkpoint was reached
    assert "nothing is saved" in caught.value.__notes__[0]
    assert not os.listdir(tmp_path)


# A run of very many episodes with a signal from outside, on the engine and in torch.
SCRIPT = """
import signal, sys, time, torch
import torch_occ as occ
from games import endless
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process is born deaf to it

class Ready(occ.Callback):
    def on_chunk(self, run):
        print("ready", flush=True)
        self.on_chunk = lambda run: None

try:
    endless(sys.argv[1], sys.argv[2], 10**8, Ready())
except BaseException as error:
    print(error.result.finished, error.saved_to, len(error.result.episodes), flush=True)
    raise
"""


@pytest.mark.parametrize("backend", ["engine", "torch"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_saves_and_then_ends_the_process(tmp_path, number, backend):
    path = tmp_path / "run"
    command = [sys.executable, "-c", SCRIPT, str(path), backend]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=ENVIRONMENT, **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.3)
            process.send_signal(number)
            begun = time.monotonic()
            output = process.stdout.readline()  # written once the run is saved
            felt = time.monotonic() - begun
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert output == f"False {path} 1\n", errors
    assert felt < 5  # a second on a machine that does nothing else
    assert f"saved to {path}; the same call continues" in errors
    # As a shell expects it of a process that was interrupted or terminated.
    assert process.returncode == (-signal.SIGINT if number == signal.SIGINT else 143)
    state = torch.load(path, weights_only=True)
    assert state["t"] > 0
    assert state["t"] % 256 == 0
    assert os.listdir(tmp_path) == ["run"]


def test_signals_are_left_alone_where_they_belong_to_others(tmp_path):
    heard = []

    class Signal(occ.Callback):
        def on_chunk(self, run):
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        assert run(tmp_path / "run", callbacks=[Signal()]).finished
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(heard) == 3
    found = []
    thread = threading.Thread(target=lambda: found.append(run(tmp_path / "other")))
    thread.start()
    thread.join()
    assert found[0].finished
    same(found[0], run(None))


def test_after_ctrl_c_no_further_seed_is_begun():
    from torch_occ._support.processes import for_each

    begun = []

    def slow(i):
        begun.append(i)
        if len(begun) == 2:
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(0.1)

    torch.set_num_threads(2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            for_each(slow, 100)
    finally:
        signal.signal(signal.SIGINT, before)
        torch.set_num_threads(THREADS)
    after = len(begun)
    assert after <= 4
    time.sleep(0.15)
    assert len(begun) == after


def test_calls_of_the_engine_become_short_where_episodes_are_slow(monkeypatch):
    """And that changes no bit."""
    from torch_occ.game import players as player

    mdp = occ.LayeredMDP.random(3, 3, 3, seed=0)
    called = []

    def play(losses):
        learner = occ.FTRL(mdp, occ.jin_luo(mdp))
        return occ.simulate(mdp, learner, losses, 3000, range(2), backend="engine")

    def counted(self, episodes, seconds, adapt=player.EnginePlayer.adapt):
        called.append(episodes)
        adapt(self, episodes, 1e-3 * episodes)  # as if an episode took a millisecond

    for losses in (occ.BernoulliLosses(random_loss(mdp)), occ.GreedyAdversary(), walk()):
        whole = play(losses)
        with monkeypatch.context() as patch:
            patch.setattr(player.EnginePlayer, "adapt", counted)
            same(whole, play(losses))
        assert len([n for n in called if n > 200]) <= 1  # the first slow one
        called.clear()


# -- places that cannot be written -------------------------------------------------------------


class NothingIsPlayed(occ.FixedPolicy):
    def propose(self, t):
        raise AssertionError("an episode was played")


def full_disk(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("place", ["file/run", "/proc/nowhere/run", "folder", "full"])
def test_an_impossible_place_is_an_error_before_the_first_episode(tmp_path, place, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    path = tmp_path / place
    if place == "full":
        monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match=r"save_to: cannot be written .*name another file") as caught:
        occ.simulate(MDP, NothingIsPlayed(MDP), walk(), 10, save_to=path, backend="torch")
    assert str(path) in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    with pytest.raises(OSError, match="save_to"):
        occ.tune(lambda psi: None, occ.jin_luo(MDP), save_to=path)


def test_a_disk_that_fills_up_costs_neither_the_history_nor_what_was_saved(tmp_path, monkeypatch):
    whole = run(None)

    class Fills(occ.Callback):
        def on_chunk(self, simulation):
            if simulation.t == 512:
                monkeypatch.setattr(os, "fsync", full_disk)

    with pytest.warns(UserWarning, match="save_to: the run is not saved: .*No space left"):
        history = run(tmp_path / "run", save_every=0.0, callbacks=[Fills()])
    same(whole, history)
    assert torch.load(tmp_path / "run", weights_only=True)["t"] == 256
    monkeypatch.undo()
    same(whole, run(tmp_path / "run"))
    assert os.listdir(tmp_path) == ["run"]


class Fails(occ.Callback):
    """A user's callback, one of whose hooks fails from some episode on."""

    def __init__(self, hook, error):
        self.calls, self.error = [], error
        setattr(self, hook, self.fail)

    def fail(self, run, *_):
        self.calls.append(run.t)
        if run.t >= 256:
            raise self.error


@pytest.mark.parametrize("hook", ["on_checkpoint", "on_chunk", "on_end"])
def test_a_callback_whose_files_fail_is_left_out_with_one_warning(hook):
    whole, failing = run(None), Fails(hook, OSError(28, "full"))

    class Counts(occ.Callback):
        ended = 0

        def on_end(self, run, history):
            self.ended += 1

    counts = Counts()
    with pytest.warns(UserWarning, match="Fails: .*full; the run goes on without") as caught:
        same(whole, run(None, callbacks=[failing, counts]))
    assert len(caught) == 1
    assert len([t for t in failing.calls if t >= 256]) == 1
    assert counts.ended == 1


def test_a_mistake_in_a_callback_is_still_an_error():
    with pytest.raises(ZeroDivisionError):
        run(None, callbacks=[Fails("on_chunk", ZeroDivisionError())])


def test_a_state_that_could_not_be_read_back_is_refused_first(tmp_path):
    class Odd(NothingIsPlayed):
        def start(self, num_seeds):
            self.state = {"own": np.random.default_rng(0)}

    with pytest.raises(ValueError, match="save_to: the state of the run could not be read back"):
        occ.simulate(MDP, Odd(MDP), walk(), 10, save_to=tmp_path / "run")
    assert not os.listdir(tmp_path)


class Locked(occ.FixedPolicy):
    """A learner that holds what can be neither copied nor hashed."""

    def __init__(self, mdp):
        super().__init__(mdp)
        self.lock = threading.Lock()

    def copy(self):
        return Locked(self.mdp)


def test_runs_that_are_not_saved_may_hold_anything():
    learner = Locked(MDP)
    assert occ.simulate(MDP, learner, walk(), 3, backend="torch").finished
    with pytest.raises(TypeError, match=r"learner\.lock: a lock cannot be hashed .* `save_to` out"):
        occ.simulate(MDP, learner, walk(), 3, backend="torch", save_to="unused")


# -- damaged files -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "run"
    run(path, 300)
    return path.read_bytes()


def refused(path, message, **options):
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message) as caught:
        occ.simulate(MDP, Interruptible(MDP), walk(), 300, (1, 2), save_to=path, **options)
    assert str(caught.value).startswith(f"{path}: ")
    assert "It is left as it is: move it away to begin anew, or name another" in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("place", [0, 500, -1])
def test_a_flipped_bit_and_a_truncated_file_are_noticed(saved, tmp_path, place):
    damaged = bytearray(saved)
    damaged[place] ^= 8
    for content in (damaged, saved[:place]):
        (tmp_path / "run").write_bytes(content)
        refused(tmp_path / "run", "damaged" if content else "is empty")
        refused(tmp_path / "run", "damaged", resume=False)


def test_no_bit_of_a_seal_can_be_flipped(tmp_path):
    path = tmp_path / "file"
    write_checked(path, "a run", b"content\nof two lines")
    whole = path.read_bytes()
    assert read_checked(path, "a run") == b"content\nof two lines"
    for place in range(len(whole)):
        for bit in (0, 2, 5):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="damaged"):
                read_checked(path, "a run", any_version=True)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "run"
    path.write_text("\\documentclass{article}\n")
    refused(path, "is not a run that torch_occ has saved")
    refused(path, "holds .* something that torch_occ has not saved", resume=False)
    torch.save({"101": torch.zeros(3)}, path)
    refused(path, "is not a run that torch_occ has saved")
    path.write_text('{"kind": 3}\n')
    refused(path, "is not a run that torch_occ has saved")
    run(None, 5).save(path)
    refused(path, "is a history, not a run")


def test_files_of_another_version_are_refused(tmp_path, monkeypatch):
    path, history = tmp_path / "run", run(None, 5)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["torch_occ._support.files"], "VERSION", "0.0.1")
        run(path, 300)
        history.save(tmp_path / "history")
    refused(path, r"was saved by torch_occ 0\.0\.1, and this is")
    same(history, occ.History.load(tmp_path / "history"))  # a result, which stays readable
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["torch_occ._support.files"], "FORMAT", 99)
        history.save(tmp_path / "history")
    with pytest.raises(ValueError, match="was saved by torch_occ"):
        occ.History.load(tmp_path / "history")
