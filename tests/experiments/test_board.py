"""`make board` opens one directory of runs/: the newest, or the newest of an experiment."""

import os
import shutil
import subprocess

import pytest
from documents import ROOT


@pytest.fixture
def make(tmp_path):
    """`make board` where TensorBoard prints its arguments, with three runs and a cache."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", ".venv/.ready"):
        (tmp_path / name).touch()
    tensorboard = binaries / "tensorboard"
    tensorboard.write_text('#!/bin/sh\necho "$@"\n')
    tensorboard.chmod(0o755)
    runs = ("corruption__1__10/C=0/a", "corruption__1__20/C=0/a", "step__0__30")
    for age, run in enumerate(runs):
        events = tmp_path / "runs" / run / "events.out.tfevents.1"
        events.parent.mkdir(parents=True)
        events.touch()
        os.utime(events, (1000 + age, 1000 + age))
    (tmp_path / "runs" / "meta_tune_cache").mkdir()  # the newest directory, without a log

    def run(*arguments):
        command = ["make", "--silent", "board", *arguments]
        # Without the arguments of the `make test` that runs this.
        own = {name: x for name, x in os.environ.items() if name not in ("ARGS", "MAKEFLAGS")}
        given = {"cwd": tmp_path, "env": own, "capture_output": True, "text": True}
        return subprocess.run(command, check=False, **given)

    return run


def test_one_run_is_opened(make):
    assert make().stdout == "--logdir runs/step__0__30\n"
    assert make("RUN=corruption").stdout == "--logdir runs/corruption__1__20\n"
    assert make("RUN=corruption__1__10").stdout == "--logdir runs/corruption__1__10\n"
    assert make("ARGS=--port 7000").stdout == "--logdir runs/step__0__30 --port 7000\n"
    done = make("RUN=nothing")
    assert done.returncode != 0
    assert "no TensorBoard log in runs/nothing*" in done.stderr
