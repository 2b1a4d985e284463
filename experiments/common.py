"""What the experiments share: where results go, how files are written, how tables are printed."""

from __future__ import annotations

import csv
import io
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


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


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that nobody ever sees half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One line a row, atomically; the columns are those of the first row. Nothing is written for no rows."""
    if not rows:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode())


def write_figure(path: Path, figure: Any, dpi: int = 150) -> None:
    """A matplotlib figure as PNG, atomically."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=dpi, bbox_inches="tight", facecolor="white")
    write_bytes(path, image.getvalue())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text columns, the first ones to the left and numbers to the right; also valid Markdown."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))) + " |"

    rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def seconds(x: float) -> str:
    """A duration with a unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if x >= size:
            return f"{x / size:.3g} {unit}"
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
