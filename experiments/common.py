"""What the experiments share: where results go, how files are written, how tables are printed."""

from __future__ import annotations

import csv
import io
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_occ._support.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One line a row, atomically; the columns are those of the first row. Nothing is written for no rows."""
    if not rows:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def write_figure(path: Path, figure: Figure) -> None:
    """A matplotlib figure as PNG, atomically."""
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150, bbox_inches="tight", facecolor="white"))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A Markdown table that is also pleasant as plain text; the columns `left` are aligned to the left."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))) + " |"

    rule = "|" + "|".join("-" * (w + 1) + ("-" if i in left else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def seconds(x: float) -> str:
    """A duration with a unit that suits it."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 300.0), ("s", 1.0), ("ms", 1e-3)):
        if x >= size:
            return f"{x / (60.0 if unit == 'min' else size):.3g} {unit}"  # minutes from five on
    return f"{x / 1e-6:.3g} µs"


def machine() -> str:
    """What the figures were measured on, in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores of {model}, {device}, Python {platform.python_version()}, torch {torch.__version__}"
