"""Tables: as Markdown, as LaTeX, and as files."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_occ._support.files import write_atomically


def markdown(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> str:
    """A Markdown table with aligned columns; those in `left` are aligned to the left."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            c.ljust(w) if i in left else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join(aligned) + " |"

    rule = (
        "|"
        + "|".join("-" * (w + 1) + ("-" if i in left else ":") for i, w in enumerate(widths))
        + "|"
    )
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def latex(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """The same table as a LaTeX `tabular` with the rules of the package booktabs."""
    columns = "".join("l" if i in left else "r" for i in range(len(header)))
    lines = [" & ".join(map(_escape, row)) + r" \\" for row in [header, *rows]]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def _escape(text: str) -> str:
    for character, written in _WRITTEN.items():
        text = text.replace(character, written)
    return text


#: The backslash comes first, because the other replacements contain one.
_WRITTEN = {
    "\\": r"\textbackslash ",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde ",
    "^": r"\textasciicircum ",
    "±": r"$\pm$",
}


def write_csv(path: str | Path, rows: Sequence[dict[str, Any]], first: Sequence[str] = ()) -> None:
    """Write one line per row, atomically; nothing if there is no column.

    Args:
        rows: dictionaries. There is a column for every key of any row; missing values are empty.
        first: columns that come first.
    """
    columns = list(dict.fromkeys([*first, *(name for row in rows for name in row)]))
    if not columns:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))
