"""The documentation is true: its code runs and prints what it says, its links lead somewhere.

Every page is on the site, its formulas can be typeset, and nothing comes from another host.
"""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from documents import documented

DOCS = Path(__file__).parent.parent / "docs"
ASSETS = DOCS / "assets"
PAGES = sorted(DOCS.rglob("*.md"))
SETTINGS = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
NAVIGATION = SETTINGS.partition("nav:")[2].partition("markdown_extensions:")[0]


def blocks(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", ["tour", "step", "regularizers", "gymnasium", "meta_tuning"])
def test_examples_run_and_print_what_they_say(name):
    page = DOCS / f"{name}.md"
    session: dict[str, object] = {"__name__": name}
    assert blocks(page)
    for number, block in enumerate(blocks(page)):
        output = io.StringIO()
        with redirect_stdout(output):
            exec(compile(block, f"{page.name}, example {number}", "exec"), session)
        assert output.getvalue().splitlines() == documented(block), block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_examples_compile_and_links_lead_somewhere(page):
    for number, block in enumerate(blocks(page)):
        compile(block, f"{page.name}, example {number}", "exec")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_page_is_on_the_site():
    listed = set(re.findall(r"(\S+\.md)$", NAVIGATION, re.MULTILINE))
    assert listed == {str(page.relative_to(DOCS)) for page in PAGES}


def prose(page: Path) -> str:
    """The text of a page without its code."""
    text = re.sub(
        r"^( *)```.*?^\1```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"^(?: {4,}\S.*\n?)+|`[^`]*`", "", text, flags=re.MULTILINE)


FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(?!\s)([^$]+)(?<!\s)\$", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_formulas_can_be_typeset(page):
    """Known commands and balanced brackets; a single dollar sign is a formula without an end."""
    known = set(
        re.findall(r'"\\(\\[A-Za-z]+)"', (ASSETS / "katex/katex.min.js").read_text("utf-8"))
    )
    known |= {r"\end", r"\middle"}  # which the script finds in another way
    for block, inline in FORMULA.findall(prose(page)):
        formula = block or inline
        assert set(re.findall(r"\\[A-Za-z]+", formula)) <= known, formula
        for start, end in [("{", "}"), (r"\left", r"\right"), (r"\begin", r"\end")]:
            count = [len(re.findall(re.escape(x) + r"(?![a-z])", formula)) for x in (start, end)]
            assert count[0] == count[1], formula
    assert "$" not in FORMULA.sub("", prose(page)).replace(r"\$", "")


def test_the_site_loads_nothing_from_another_host():
    without_comments = re.sub(r"(^|\s)#.*", "", SETTINGS)
    assert "//" not in without_comments
    # Two defaults name a host: the fonts of the theme, and the script of `offline` for the search.
    assert re.search(r"^  font: false$", without_comments, re.MULTILINE)
    assert re.search(r"^  polyfills: \[assets/iframe-worker/", without_comments, re.MULTILINE)
    assert re.search(r"^  - offline$", without_comments, re.MULTILINE)
    for asset in re.findall(r"\bassets/[\w./-]+", without_comments):
        assert (DOCS / asset).is_file(), asset
    for asset in [*ASSETS.rglob("*.css"), *ASSETS.rglob("*.js")]:
        hosts = set(re.findall(r"//([\w-]+\.[\w.-]+)", asset.read_text(encoding="utf-8")))
        assert hosts <= {"www.w3.org"}, asset  # the names of XML namespaces, which are not loaded
    for page in PAGES:
        assert not re.search(
            r"!\[[^\]]*\]\(\w+:|\bsrc=[\"']?\w*:?//|<(?:script|link)", prose(page)
        ), page


def test_every_public_name_is_in_the_reference():
    import torch_occ as occ

    reference = " ".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    whole = {"torch_occ.regularizers.schedules"}  # modules whose every member is shown
    public = {name for name, x in vars(occ).items() if not name.startswith("_") and callable(x)}
    missing = {
        name
        for name in public
        if not re.search(rf"\b{name}\b", reference) and vars(occ)[name].__module__ not in whole
    }
    assert not missing
