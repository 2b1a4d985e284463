"""Examples in documentation, and the outputs that they show."""

import re
from pathlib import Path

#: The repository.
ROOT = Path(__file__).parents[2]


def documented(block: str) -> list[str]:
    """The outputs that a block shows: comments behind a `print(...)`, or in the lines after it."""
    found: list[str] = []
    after_print = False
    for line in block.splitlines():
        if re.match(r"\s*print\(", line):
            _, behind, output = line.partition("  # ")
            found += [output] if behind else []
            after_print = not behind
        elif after_print and line.startswith("# "):
            found.append(line[2:])
        else:
            after_print = False
    return found


def anchors(text: str) -> set[str]:
    """The anchors of all headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
