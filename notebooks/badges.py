"""Badges of the README, drawn from pyproject.toml; they need no network.

`python notebooks/badges.py` writes docs/images/badges/*.svg.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "images" / "badges"

_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{text}">
  <title>{text}</title>
  <rect width="{width}" height="20" rx="3" fill="#0072b2"/>
  <path d="M3 0h{edge}v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#444"/>
  <g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
    <text x="6" y="14" textLength="{left_width}">{left}</text>
    <text x="{right_at}" y="14" textLength="{right_width}">{right}</text>
  </g>
</svg>
"""


def _svg(left: str, right: str) -> str:
    left_width, right_width = 6 * len(left), 6 * len(right)
    return _SVG.format(
        text=f"{left}: {right}",
        left=left,
        right=right,
        left_width=left_width,
        right_width=right_width,
        edge=left_width + 9,
        right_at=left_width + 18,
        width=left_width + right_width + 24,
    )


def badges() -> dict[str, str]:
    """The SVG text of every badge, by file name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    lowest = re.search(r"torch>=([\d.]+)", " ".join(project["dependencies"]))
    newest = re.search(r"^torch==(\d+\.\d+)", pins, re.MULTILINE)
    assert lowest is not None
    assert newest is not None
    return {
        "python.svg": _svg("python", ", ".join(pythons)),
        "torch.svg": _svg("torch", " to ".join(sorted({lowest[1], newest[1]}))),
        "licence.svg": _svg("licence", project["license"]),
        "notebooks.svg": _svg("notebooks", "open"),
    }


if __name__ == "__main__":
    for name, text in badges().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
