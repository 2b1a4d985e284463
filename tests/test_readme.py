"""The README is true: its code runs, in order and in one session, and prints what it says it prints."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def documented(block: str) -> list[str]:
    """The outputs that a block shows: the comment behind a `print(...)`, or the lines of comments after it."""
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


def test_every_module_is_on_the_map():
    modules = {path.stem for path in (ROOT / "torch_occ").glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in (ROOT / "torch_occ").glob("*/__init__.py")}
    mapped = set(re.findall(r"^    (\w+)(?:\.py|/)  ", TEXT, re.MULTILINE))
    assert modules <= mapped, f"missing: {sorted(modules - mapped)}"
