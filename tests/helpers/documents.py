"""Examples in documentation, and the outputs that they show."""

import re
from pathlib import Path

#: The repository.
ROOT = Path(__file__).parents[2]
#: A block that starts worker processes is a script, which another test runs.
SCRIPT = '__name__ == "__main__"'


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


def documented(block: str) -> list[str]:
    """The outputs that a block shows."""
    return split_outputs(block)[1]


def anchors(text: str) -> set[str]:
    """The anchors of all headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
