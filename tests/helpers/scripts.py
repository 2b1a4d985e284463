"""Experiments as a user starts them: from the command line."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def run(module: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-W",
        "error::UserWarning:experiments",
        "-m",
        f"experiments.{module}",
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def only_directory(root: Path, name: str) -> Path:
    (found,) = root.iterdir()
    assert found.name.startswith(f"{name}__0__")
    assert not [path for path in found.iterdir() if path.name.startswith(".")], (
        "a temporary file was left behind"
    )
    return found
