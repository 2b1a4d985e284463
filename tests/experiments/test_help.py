"""`--help` of every experiment: the arguments it has, without an import of torch."""

import dataclasses
import importlib
import subprocess
import sys

import pytest
from documents import ROOT

import experiments

SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "experiments").glob("*.py")
    if '\nif __name__ == "__main__":\n' in path.read_text()
)


def fields(arguments):
    return [(x.name, x.type, x.default) for x in dataclasses.fields(arguments)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_help_shows_the_arguments_of_the_script(script):
    real = importlib.import_module(f"experiments.{script}").Args
    quick = experiments.excerpt(f"experiments.{script}", "Args")
    assert quick is not real
    assert fields(quick) == fields(real)


def test_no_help_imports_torch():
    """All of them in one process: what is imported is measured, not how long it takes."""
    lines = ["import sys", "import tyro", "from experiments import excerpt"]
    lines += [f"tyro.extras.get_parser(excerpt('experiments.{x}', 'Args'))" for x in SCRIPTS]
    lines += ["print(sorted({'torch', 'numpy', 'torch_occ', 'matplotlib'} & set(sys.modules)))"]
    assert len(SCRIPTS) >= 15
    assert python("-c", "\n".join(lines)).stdout == "[]\n"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_from_the_command_line(flag):
    done = python("-X", "importtime", "-m", "experiments.demo", "--episodes", "30", flag)
    assert "usage: python -m experiments.demo" in done.stdout
    assert "--adversary {greedy,switching}" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "tyro" in imported
    assert not {"torch", "numpy"} & imported


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
