"""Sweeps: call a function once for every cell of a grid, on local processes or a Dask cluster.

A cell is a dictionary that JSON can hold, and so is the result of the function. The driver writes
each finished cell at once to a file of its own, atomically. To continue an interrupted sweep, run
it again with the same directory. Only one driver at a time can use a directory. Workers write
nothing, so a cluster needs no shared file system.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_occ._support.extras import extra, progress_bar, summary_writer
from torch_occ._support.files import read_checked_json, write_atomically, write_checked_json
from torch_occ._support.fingerprints import fingerprint
from torch_occ._support.tables import write_csv
from torch_occ.sweeps.cells import Cell, Config, Failure, Function
from torch_occ.sweeps.locks import sole_user
from torch_occ.sweeps.workers import connect, on_cluster, on_processes

#: The name of a stored cell in messages.
_KIND = "a cell of a sweep"

#: Seconds within which a scheduler must answer.
ANSWER_WITHIN = 10.0


@dataclass(frozen=True)
class SweepResult:
    """The finished cells in the order of the grid, and the failed ones.

    Each finished cell is a dictionary of the configuration and the function's result.
    """

    rows: list[dict[str, Any]]
    failures: list[Failure]


def sweep(
    function: Function,
    cells: Sequence[Config],
    directory: str | Path,
    *,
    processes: int = 2,
    cluster: str | None = None,
    progress: bool = True,
    tensorboard: bool = True,
) -> SweepResult:
    """Call `function(config)` for every cell that `directory` does not hold yet.

    The directory then holds `cells/<key>.json` for every finished cell, `results.csv` with one line
    per cell, `failures.json` if cells failed (the next sweep tries them again), `tensorboard/` with
    the hyperparameters of each, and `sweep.lock`.

    Args:
        function: a deterministic function of the configuration that workers can import. Use
            another directory when you change it: cells computed by other code are refused.
        cells: configurations that JSON can hold, for example from `grid`.
        processes: the number of local processes, without a cluster.
        cluster: the address of a Dask scheduler, `tcp://host:port`, whose workers have this package
            and the function installed.
        progress: show a progress bar.
        tensorboard: log the numbers and strings of every cell for the HParams dashboard.

    Returns:
        The finished and the failed cells. If the disk is full, there are warnings, and the
        results are still returned.

    Raises:
        RuntimeError: if another sweep uses this directory.
        ValueError: if an argument is wrong, or if a stored cell is damaged or was computed by
            other code or by another version of this package.
        ConnectionError: if no Dask scheduler answers, or it is lost.
        KeyboardInterrupt: after Ctrl-C; finished cells are stored.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    with sole_user(Path(directory), "sweep"):
        return _sweep(function, cells, Path(directory), processes, cluster, progress, tensorboard)


def _sweep(
    function: Function,
    cells: Sequence[Config],
    directory: Path,
    processes: int,
    cluster: str | None,
    progress: bool,
    tensorboard: bool,
) -> SweepResult:
    name = _name(function)
    todo = [Cell(config, _key(name, config)) for config in _check(cells)]
    store, board = directory / "cells", directory / "tensorboard"
    store.mkdir(parents=True, exist_ok=True)
    code = fingerprint(function=function)
    found = {cell.key: stored for cell in todo if (stored := _read(store, cell, code)) is not None}
    missing = [cell for cell in todo if cell.key not in found]
    for cell in todo:
        if tensorboard and cell.key in found:
            with _warning_if_full():
                log_hparams(board / cell.key, cell.config, found[cell.key])
    failures: list[Failure] = []
    # Connect first, so that a wrong address fails before any work is done.
    client = connect(cluster, ANSWER_WITHIN) if cluster is not None and missing else None
    work = (
        on_processes(function, missing, processes)
        if client is None
        else on_cluster(function, missing, client)
    )
    with (
        progress_bar(len(todo), len(found), "cell") if progress else _Silent() as bar,
        closing(work),
    ):
        for cell, outcome in work:
            if isinstance(outcome, Failure):
                failures.append(outcome)
                bar.write(f"failed: {outcome}")
            else:
                found[cell.key] = outcome
                with _warning_if_full():
                    _write(store, cell, code, outcome)
                    if tensorboard:
                        log_hparams(board / cell.key, cell.config, outcome)
            bar.update()
    rows = [cell.config | found[cell.key] for cell in todo if cell.key in found]
    columns = [name for cell in todo for name in cell.config]
    with _warning_if_full():
        write_csv(directory / "results.csv", rows, first=columns)
        _write_failures(directory / "failures.json", failures)
    return SweepResult(rows, failures)


# -- files -------------------------------------------------------------------------------------


def _check(cells: Sequence[Config]) -> Sequence[Config]:
    seen: dict[str, int] = {}
    for i, config in enumerate(cells):
        try:
            text = json.dumps(config, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"cells: cell {i}, {config!r}, is not what JSON can hold: {error}"
            ) from error
        if text in seen:
            raise ValueError(f"cells: cells {seen[text]} and {i} are the same, {text}")
        seen[text] = i
    return cells


def _name(function: Function) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or name is None or "<" in name:  # <lambda>, <locals>
        raise ValueError(
            "function: expected a function at the top level of a module, which workers can import "
            f"by its name, got {function!r}"
        )
    if module == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(
            f"function: {name} was defined interactively; put it into a module, so that workers "
            "can import it"
        )
    return f"{module}.{name}"


def _key(name: str, config: Config) -> str:
    return hashlib.sha256(f"{name}:{json.dumps(config, sort_keys=True)}".encode()).hexdigest()[:20]


def _read(store: Path, cell: Cell, code: str) -> dict[str, Any] | None:
    """The stored result of a cell, or None; a ValueError if the file belongs to another cell."""
    path = store / f"{cell.key}.json"
    if not path.exists():
        return None
    stored = read_checked_json(path, _KIND)
    if stored["config"] != json.loads(json.dumps(cell.config)):
        other = json.dumps(stored["config"])
        raise ValueError(f"{path}: holds another cell, {other}; move it away")
    if stored["code"] != code:
        raise ValueError(
            f"{path}: was computed when the code of the function, or code that it calls, was not "
            "what it is now; use another directory, or move the cells away to compute them again"
        )
    result: dict[str, Any] = stored["result"]
    return result


def _write(store: Path, cell: Cell, code: str, result: dict[str, Any]) -> None:
    content = {"config": cell.config, "result": result, "code": code}
    write_checked_json(store / f"{cell.key}.json", _KIND, content)


@contextmanager
def _warning_if_full() -> Iterator[None]:
    """Turn an OSError into a warning, so that the results that were computed are not lost."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"sweep: {error}; the sweep goes on, and returns its results", stacklevel=4)


def _write_failures(path: Path, failures: Sequence[Failure]) -> None:
    if failures:
        text = json.dumps([asdict(failure) for failure in failures], indent=1)
        write_atomically(path, lambda file: file.write(text.encode()))
    else:
        path.unlink(missing_ok=True)


def log_hparams(directory: Path, config: Config, result: dict[str, Any]) -> None:
    """Write one run for TensorBoard's HParams dashboard, atomically; do nothing if it exists."""
    if directory.exists():
        return
    with extra("experiments", "hparams need tensorboard, or tensorboard=False"):
        from torch.utils.tensorboard.summary import hparams
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".", dir=directory.parent))
    try:
        metrics = {name: value for name, value in result.items() if isinstance(value, int | float)}
        with summary_writer(temporary) as writer:
            values = {
                name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
                for name, value in config.items()
            }
            _, start, end = hparams(values, {})
            # Leave out the first summary, a list of columns. TensorBoard then collects the columns
            # of all runs, which may differ.
            for summary in (start, end):
                writer.file_writer.add_summary(summary, 0)
            for name, value in metrics.items():
                writer.add_scalar(name, value, 0)
        temporary.chmod(0o755)
        temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


# -- progress ----------------------------------------------------------------------------------


class _Silent:
    """A progress bar that shows nothing."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self) -> None: ...

    def write(self, text: str) -> None: ...
