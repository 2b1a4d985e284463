"""Notebooks, made from pages of the documentation.

`python notebooks/make.py` writes notebooks/*.ipynb. An example becomes a cell, and
the outputs that the page shows become the outputs of the cell.
"""

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parent

#: A block that starts worker processes is a script, which another test runs.
SCRIPT = '__name__ == "__main__"'
#: The page of each notebook.
SOURCES = {
    "tour": "tour",
    "layer": "networks",
    "decisions": "decisions",
    "demonstrations": "inverse",
    "game": "results",
}
_FIRST = """\
*Made from [a page of the documentation]({page}.md). If `import torch_occ` fails:
`%pip install "torch-occ[all]"`, or `%pip install "..[all]"` in a copy of the repository.*
"""
_LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )(?!https?:|#)", re.MULTILINE)
_PART = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def split_outputs(block: str) -> tuple[str, list[str]]:
    """A block without its outputs, and these: comments behind a `print(...)`, or in lines after."""
    code: list[str] = []
    found: list[str] = []
    after_print = False
    for line in block.splitlines():
        if re.match(r"\s*print\(", line):
            line, behind, output = line.partition("  # ")
            found += [output] if behind else []
            after_print = not behind
        elif after_print and line.startswith("# "):
            found.append(line[2:])
            continue
        else:
            after_print = False
        code.append(line)
    return "\n".join(code), found


def _cell(number: int, kind: str, text: str, **more: object) -> dict[str, object]:
    lines = text.strip().splitlines(keepends=True)
    return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines} | more


def notebook(name: str) -> str:
    """The text of a notebook, which a test runs cell by cell."""
    page = SOURCES[name]
    text = (FOLDER.parent / "docs" / f"{page}.md").read_text(encoding="utf-8")
    title, _, rest = text.partition("\n")
    made: list[dict[str, object]] = []
    for i, part in enumerate(_PART.split(f"{title}\n\n{_FIRST.format(page=page)}{rest}")):
        if i % 2 and SCRIPT not in part:
            code, outputs = split_outputs(part)
            shown = [line + "\n" for line in outputs]
            stream = {"name": "stdout", "output_type": "stream", "text": shown}
            outputs = [stream] if shown else []
            made.append(_cell(i, "code", code, execution_count=None, outputs=outputs))
        elif part.strip():
            part = f"```python\n{part}```" if i % 2 else _LINK.sub(r"\1../docs/", part)
            made.append(_cell(i, "markdown", part))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def cells(name: str) -> list[tuple[str, list[str]]]:
    """Code and lines of output of every cell of a notebook, as they stand in its file."""
    whole = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [
        ("".join(x["source"]), "".join(y for out in x["outputs"] for y in out["text"]).splitlines())
        for x in whole["cells"]
        if x["cell_type"] == "code"
    ]


if __name__ == "__main__":
    for name in SOURCES:
        (FOLDER / f"{name}.ipynb").write_text(notebook(name), encoding="utf-8")
