"""The documentation is true: its code runs and prints what it says, its links lead somewhere, and every page is on the site."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from documents import documented

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NAVIGATION = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2].partition("markdown_extensions:")[0]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "name",
    [
        "tour",
        "step",
        "regularizers",
        "learners",
        "losses",
        "estimators",
        "results",
        "gymnasium",
        "meta_tuning",
    ],
)
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


def test_every_public_name_is_in_the_reference():
    import torch_occ as occ

    reference = " ".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    whole = {"torch_occ.regularizers.schedules"}  # modules whose every member is shown
    public = {name for name, thing in vars(occ).items() if not name.startswith("_") and callable(thing)}
    missing = {name for name in public if not re.search(rf"\b{name}\b", reference) and vars(occ)[name].__module__ not in whole}
    assert not missing
