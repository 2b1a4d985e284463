"""The README is true: its code runs and prints what it says, links and badges are right."""

import io
import re
from contextlib import redirect_stdout

import pytest
from documents import ROOT, anchors, documented

from notebooks.badges import FOLDER, badges
from torch_occ import Status, __main__, __version__

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def test_the_outputs_are_found():
    example = (
        "print(1)  # 1\nx = 2  # a number\nfor i in x:\n    print(i)\n# 2\n# 3\n# 4\n\n# no output"
    )
    assert documented(example) == ["1", "2", "3", "4"]
    assert len(BLOCKS) >= 5
    assert sum(map(len, map(documented, BLOCKS))) >= 8


def test_examples_run_and_print_what_they_say():
    session: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(BLOCKS):
        output = io.StringIO()
        with redirect_stdout(output):
            exec(compile(block, f"README.md, example {number}", "exec"), session)
        assert output.getvalue().splitlines() == documented(block), block


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if target.startswith("https://"):
            continue
        there = ROOT / (target or page)
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there.read_text(encoding="utf-8")), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_short(page):
    """A line that is one link or one row of a table cannot be wrapped."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    assert not [x for x in lines if len(x) > 100 and not x.startswith(("|", "![", "["))]


def test_badges_say_what_pyproject_says():
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")}
    assert found == badges(), "run: python notebooks/badges.py"
    shown = re.findall(r"!\[([^]]*)\]\(docs/images/badges/(\w+\.svg)\)", README)
    titles = {name: re.search("<title>(.*)</title>", text)[1] for name, text in badges().items()}
    assert {name for _, name in shown} == set(badges())
    for text, name in shown:
        assert set(re.findall(r"[\d.]*\d", text)) == set(re.findall(r"[\d.]*\d", titles[name]))


def test_the_citation_and_the_changelog_have_the_version():
    assert f"version = {{{__version__}}}" in README
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[([\d.]+)\]", changes, re.MULTILINE)[0] == __version__


def test_diffs_in_contributing_are_code_of_the_package():
    """Their lines are in the file that they name, in this order; others may stand between."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    diffs = "".join(re.findall(r"^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    parts = re.split(r"^\+\+\+ b/(\S+)\n", diffs, flags=re.MULTILINE)[1:]
    assert len(parts) >= 2 * 5
    for file, added in zip(parts[::2], parts[1::2], strict=True):
        lines = iter((ROOT / file).read_text(encoding="utf-8").splitlines())
        for line in added.splitlines():
            assert line[1:] in lines, f"{file}: {line}"


def test_contributing_lists_the_packages_in_order():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    architecture = (ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8")
    order = re.findall(r'"(\w+)"', architecture.partition("ORDER = (")[2].partition(")")[0])
    assert re.findall(r"^\| \[`(\w+)`\]", text, re.MULTILINE) == order


def test_the_page_of_the_step_lists_every_status():
    text = (ROOT / "docs" / "step.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| ([A-Z_]+) \|", text, re.MULTILINE) == [x.name for x in Status]


@pytest.mark.slow
def test_the_engine_is_compiled_ahead(capsys):
    """Here, other tests have compiled most of it."""
    __main__.command(["compile"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == [f"{n} of 8" for n in range(1, 9)]
    assert lines[-1].startswith("ready after ")
    with pytest.raises(SystemExit):
        __main__.command(["comple"])
    assert "choose from" in capsys.readouterr().err
