import io
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

import torch_occ as occ
from torch_occ._support.choices import wants_bar
from torch_occ.game.callbacks import configuration, describe, parameters
from torch_occ.game.history import band
from torch_occ.game.simulate import Simulation

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

MDP = occ.LayeredMDP.random(horizon=2, width=2, num_actions=2, seed=0)
MEAN = torch.tensor([[0.2, 0.8], [0.5, 0.1], [0.3, 0.4]], dtype=torch.float64)
EPISODES, SEEDS = 30, range(3)


def play(directory, learner=None, losses=None, episodes=EPISODES, **options):
    learner = occ.FTRL(MDP, occ.jin_luo(MDP, beta=1.0)) if learner is None else learner
    losses = occ.BernoulliLosses(MEAN) if losses is None else losses
    board = occ.TensorBoard(directory, images_per_decade=options.pop("images", 0))
    options["callbacks"] = [*options.pop("before", []), board]
    options |= {"config": {"note": "a|b", "deep": {"x": [1]}}, "backend": "torch"}
    return occ.simulate(MDP, learner, losses, episodes, SEEDS, **options)


def read(directory):
    found = event_accumulator.EventAccumulator(
        str(directory), size_guidance={"scalars": 0, "images": 0, "tensors": 0}
    )
    return found.Reload()


PARTS = ("", "_lower", "_upper")


def curve(found, tag):
    events = found.Scalars(tag)
    return [event.step for event in events], torch.tensor([event.value for event in events])


def test_every_curve_equals_the_history(tmp_path):
    history = play(tmp_path)
    found, t = read(tmp_path), history.episodes
    mean, realised = band(history.regret).mean, band(history.realised_regret)
    expected = {f"Regret/mean{x}": y for x, y in zip(PARTS, band(history.regret), strict=True)}
    expected |= {f"Regret/realised_mean{x}": y for x, y in zip(PARTS, realised, strict=True)}
    expected |= {
        "Regret/over_sqrt_T": mean / t.sqrt(),
        "solver/newton_steps": history.newton_steps.mean(0),
        "solver/dual_residual": history.dual_residual.amax(0),
        "solver/flow_residual": history.flow_residual.amax(0),
        "solver/uncertified": history.uncertified.sum(0),
        "theta/learning_rate": 1 / t.sqrt(),
        "theta/alpha": torch.full_like(mean, 2**-0.5),
        "theta/beta": torch.ones_like(mean),
        "theta/gamma": torch.ones_like(mean),
    }
    groups = sorted({tag.partition("/")[0] for tag in found.Tags()["scalars"]})  # as TensorBoard
    assert groups == ["Regret", "policy", "solver", "speed", "theta"]
    for tag, values in expected.items():
        steps, logged = curve(found, tag)
        assert steps == t.tolist(), tag
        torch.testing.assert_close(logged, values.float(), msg=tag)
    steps, logged = curve(found, "Regret/over_log_T")
    assert steps == t.tolist()[1:]  # log 1 = 0
    torch.testing.assert_close(logged, (mean[1:] / t[1:].log()).float())
    policy = {"entropy", "distance_to_optimal", "loss_above_optimal", "smallest_q"}
    assert {*found.Tags()["scalars"]} == {
        *expected,
        "Regret/over_log_T",
        "speed/episodes_per_second",
        *(f"policy/{name}" for name in policy),
    }


def test_policy_numbers_at_the_uniform_policy_and_at_the_optimum(tmp_path):
    play(tmp_path / "uniform", occ.FixedPolicy(MDP))
    play(tmp_path / "best", occ.FixedPolicy(MDP, occ.optimal_policy(MDP, MEAN).policy))
    uniform, best = read(tmp_path / "uniform"), read(tmp_path / "best")
    assert curve(uniform, "policy/entropy")[1][-1] == pytest.approx(torch.tensor(2.0).log().item())
    optimal = occ.occupancy(MDP, occ.optimal_policy(MDP, MEAN).policy)
    q = occ.interior_point(MDP)
    distance, loss = (q - optimal).abs().sum() / 4, ((q - optimal) * MEAN).sum()
    for name, expected in (("distance_to_optimal", distance), ("loss_above_optimal", loss)):
        found = curve(uniform, f"policy/{name}")[1][-1]
        assert float(found) == pytest.approx(float(expected))
    for name in ("entropy", "distance_to_optimal", "loss_above_optimal"):
        assert float(curve(best, f"policy/{name}")[1].abs().max()) <= 1e-7
    # no solver, no curves of one
    assert not any(tag.startswith("solver/") for tag in uniform.Tags()["scalars"])


def test_images_text_layout_and_hparams(tmp_path):
    history = play(tmp_path, images=1)
    found = read(tmp_path)
    heat_maps = [event.step for event in found.Images("policy/q")]
    assert heat_maps[0] == 1
    assert heat_maps[-1] == EPISODES
    assert len(heat_maps) <= 4 < len(history.episodes)
    (figure,) = found.Images("Regret/on_log_axes")
    assert figure.step == EPISODES
    assert Image.open(io.BytesIO(figure.encoded_image_string)).size == (figure.width, figure.height)
    (text,) = found.Tensors("configuration/text_summary")
    table = " ".join(text.tensor_proto.string_val[0].decode().split())
    assert "HybridTsallis(alpha=0.707107) / InverseSqrt(gamma=1) + LogBarrier(beta=1)" in table
    assert "| config: note | `a\\|b` |" in table
    assert '`{"x": [1]}`' in table
    assert "custom_scalars__config__" in found.Tags()["tensors"]
    from tensorboard.plugins.hparams import metadata

    content = found.PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert start.hparams["beta"].number_value == 1.0
    assert start.hparams["learner"].string_value == "FTRL"
    shown = set(start.hparams) - {"note", "learner", "losses", "alpha", "beta", "gamma"}
    assert shown == {"episodes", "seeds", "horizon", "states", "actions"}  # and no plumbing
    assert metadata.SESSION_END_INFO_TAG in content
    columns = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
    assert {metric.name.tag for metric in columns.metric_infos} <= {*found.Tags()["scalars"]}


def test_corruption_is_a_curve_where_there_is_some(tmp_path):
    history = play(tmp_path, losses=occ.Corrupted(occ.BernoulliLosses(MEAN), budget=5.0))
    torch.testing.assert_close(
        curve(read(tmp_path), "Regret/spent_corruption")[1], history.corruption.mean(0).float()
    )


class Killed(occ.Callback):
    """Stops after some chunks, as a killed process would: nobody's on_end is called."""

    def __init__(self, t):
        self.t = t

    def on_checkpoint(self, run):
        if run.t == self.t:
            raise MemoryError


def next_second():
    """Event files are read in the order of their names, which count seconds."""
    time.sleep(1.01 - time.time() % 1)


@pytest.mark.parametrize("moved", [False, True], ids=["same directory", "fresh directory"])
def test_a_resumed_run_has_every_point_once(tmp_path, moved):
    options = {"episodes": 300, "checkpoints": [1, 50, 250, 256, 280, 300]}
    options["learner"] = occ.FixedPolicy(MDP)
    whole = play(tmp_path / "whole", **options)
    kept = {"save_to": tmp_path / "run.pt", "save_every": 0.0}
    with pytest.raises(MemoryError):
        # has logged 280, saved 256
        play(tmp_path / "parts", before=[Killed(300)], **kept, **options)
    until = time.monotonic() + 15  # a thread of TensorBoard writes the last points
    while (logged := curve(read(tmp_path / "parts"), "Regret/mean")[0])[-1] < 280:
        assert time.monotonic() < until, logged
    assert logged == [1, 50, 250, 256, 280]
    next_second()
    directory = tmp_path / ("other" if moved else "parts")
    play(directory, **kept, **options)
    found = read(directory)
    for tag, values in (
        ("Regret/mean", whole.regret.mean(0)),
        ("Regret/realised_mean", whole.realised_regret.mean(0)),
    ):
        steps, logged = curve(found, tag)
        assert steps == whole.episodes.tolist()
        torch.testing.assert_close(logged, values.float())
    assert len(found.Tensors("configuration/text_summary")) == 1
    next_second()
    play(directory, **kept, **options)  # finished already: nothing to add
    assert [event.step for event in read(directory).Images("Regret/on_log_axes")] == [300]


def test_a_run_from_the_beginning_replaces_what_was_there(tmp_path):
    play(tmp_path, episodes=40)
    next_second()
    history = play(tmp_path, episodes=20)
    assert curve(read(tmp_path), "Regret/mean")[0] == history.episodes.tolist()


class NothingIsPlayed(occ.FixedPolicy):
    def propose(self, t):
        raise AssertionError("an episode was played")


def test_an_impossible_directory_is_an_error_before_the_run(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    message = r"TensorBoard cannot write here .*name another directory.*file/run"
    with pytest.raises(OSError, match=message):
        play(tmp_path / "file" / "run", NothingIsPlayed(MDP))
    with pytest.raises(OSError, match="TensorBoard cannot write here"):
        play(Path("/proc/nowhere"), NothingIsPlayed(MDP))


class Loses(occ.Callback):
    """Removes a directory in the middle of a run."""

    def __init__(self, directory):
        self.directory = directory

    def on_checkpoint(self, run):
        if run.t == 10:
            shutil.rmtree(self.directory)


def test_a_directory_that_vanishes_costs_a_warning_and_not_the_run(tmp_path):
    expected = play(tmp_path / "other").regret
    log = tmp_path / "log"
    message = "TensorBoard's directory has gone.*log'; the run goes on"
    with pytest.warns(UserWarning, match=message) as caught:
        history = play(log, before=[Loses(log)])
    assert len(caught) == 1
    assert history.finished
    assert torch.equal(history.regret, expected)
    assert not log.exists()


def test_a_full_disk_costs_a_warning_and_not_the_run(tmp_path):
    """As TensorBoard's own writer reports it: at the next call after its file failed."""

    class Fills(occ.Callback):
        def on_checkpoint(self, run):
            if run.t == 10:
                worker = board.writer.file_writer.event_writer._async_writer._worker
                worker.exception = OSError(28, "No space left")

    board = occ.TensorBoard(tmp_path / "log", images_per_decade=0)
    certificate = occ.theory.Certificate()
    learner, losses = occ.FTRL(MDP, occ.jin_luo(MDP, beta=1.0)), occ.BernoulliLosses(MEAN)
    options = {"callbacks": [Fills(), board, certificate], "backend": "torch"}
    with pytest.warns(UserWarning, match="No space left") as caught:
        history = occ.simulate(MDP, learner, losses, EPISODES, SEEDS, **options)
    (warning,) = caught
    assert "No space left; the run goes on without this callback" in str(warning.message)
    assert history.finished
    # nothing of it is lost
    assert certificate.curves["episodes"].tolist() == history.episodes.tolist()


@pytest.mark.parametrize(
    ("missing", "callback"), [("tqdm", occ.ProgressBar), ("matplotlib", occ.TensorBoard)]
)
def test_a_missing_package_is_named(monkeypatch, tmp_path, missing, callback):
    monkeypatch.setitem(sys.modules, missing, None)
    watching = [callback(*[tmp_path] * (callback is occ.TensorBoard))]
    losses = occ.BernoulliLosses(MEAN)
    with pytest.raises(ImportError, match=rf"{missing}.*pip install 'torch-occ\[experiments\]'"):
        occ.simulate(MDP, NothingIsPlayed(MDP), losses, 1, callbacks=watching)


def test_parameters_are_found_and_named_apart():
    twice = occ.Tsallis(0.3) / occ.InverseSqrt(2.0) + occ.LogBarrier(1.0) / occ.InverseSqrt(3.0)
    found = parameters(occ.FTRL(MDP, twice, occ.ImplicitExploration(0.1)), 4)
    expected = {"bias": 0.1, "learning_rate": 1.0, "learning_rate_2": 1.5, "power": 0.3}
    assert found == pytest.approx(expected | {"gamma": 2.0, "beta": 1.0, "gamma_2": 3.0})
    optimist = occ.OptimisticValueIteration(MDP, scale=0.25)
    assert parameters(optimist, 1) == {"scale": 0.25, "floor": 0.0}
    assert parameters(occ.FixedPolicy(MDP), 1) == {}


def test_a_description_has_the_numbers_but_no_tables():
    assert (
        describe(2 * (occ.Shannon() + occ.LogBarrier(3.0)))
        == "(Shannon() + LogBarrier(beta=3)) * 2"
    )
    assert describe(occ.Corrupted(occ.BernoulliLosses(MEAN), 5.0)) == (
        "Corrupted(base=BernoulliLosses(noise=bernoulli), budget=5, strategy=front, "
        "noise=bernoulli)"
    )
    run = Simulation(MDP, occ.FixedPolicy(MDP), occ.BernoulliLosses(MEAN), 5, range(20), None)
    assert "0, 1, 2, 3, 4, 5, 6, 7, ... (20)" in configuration(run)


def test_the_progress_bar_counts_episodes(capsys):
    bar = occ.ProgressBar("here")
    occ.simulate(MDP, occ.FixedPolicy(MDP), occ.BernoulliLosses(MEAN), 10, callbacks=[bar])
    assert bar.bar.n == 10
    assert "here: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_shows_a_bar_by_default_and_a_file_none(capsys, monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert wants_bar(None) == terminal
    for progress, shown in ((True, True), (False, False), (None, False)):  # None: too short a run
        occ.simulate(MDP, occ.FixedPolicy(MDP), occ.BernoulliLosses(MEAN), 10, progress=progress)
        assert ("FixedPolicy: 100%" in capsys.readouterr().err) == shown
