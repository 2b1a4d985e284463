"""Shared by the experiments: run directories, figures, tables, durations, the machine."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torch_occ._support.files import markdown, write_atomically
from torch_occ._support.files import write_csv as write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: A Markdown table that reads well as plain text.
table = markdown


def run_directory(root: Path, experiment: str, seed: int) -> Path:
    """`<root>/<experiment>__<seed>__<time>`, created, and never one that exists already."""
    stamp = int(time.time())
    while True:
        path = root / f"{experiment}__{seed}__{stamp}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            stamp += 1
        else:
            return path


def write_figure(path: Path, figure: Figure) -> None:
    """A matplotlib figure as PNG, atomically."""
    write_atomically(
        path,
        lambda file: figure.savefig(
            file, format="png", dpi=150, bbox_inches="tight", facecolor="white"
        ),
    )


def seconds(x: float) -> str:
    """A duration with a unit that suits it."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 300.0), ("s", 1.0), ("ms", 1e-3)):
        if x >= size:
            return f"{x / (60.0 if unit == 'min' else size):.3g} {unit}"  # minutes from five on
    return f"{x / 1e-6:.3g} µs"


def machine() -> str:
    """The machine and the versions, in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} cores of {model}, {device}, {versions}"
