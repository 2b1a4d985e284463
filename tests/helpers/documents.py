"""Examples in documentation, and the outputs that they show."""

import re
from pathlib import Path

from notebooks.make import split_outputs

#: The repository.
ROOT = Path(__file__).parents[2]


def documented(block: str) -> list[str]:
    """The outputs that a block shows."""
    return split_outputs(block)[1]


def anchors(text: str) -> set[str]:
    """The anchors of all headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
