"""The README is true: its code runs, in order and in one session, and prints what it says it prints."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from documents import documented

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_the_outputs_are_found():
    assert documented("print(1)  # 1\nx = 2  # a number\nfor i in x:\n    print(i)\n# 2\n# 3\n# 4\n\n# no output") == ["1", "2", "3", "4"]
    assert len(BLOCKS) >= 6
    assert sum(map(len, map(documented, BLOCKS))) >= 8


@pytest.mark.filterwarnings("ignore::UserWarning")  # diffcp tells of an inaccurate solve in this way; that is the point
def test_examples_run_and_print_what_they_say():
    session: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(BLOCKS):
        output = io.StringIO()
        with redirect_stdout(output):
            exec(compile(block, f"README.md, example {number}", "exec"), session)
        assert output.getvalue().splitlines() == documented(block), block


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT):
        assert target.startswith("https://") or (ROOT / target).exists(), target
