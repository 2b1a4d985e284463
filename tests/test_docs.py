"""The documentation is true: its code runs and prints what it says, and what it names is there."""

import io
import os
import pkgutil
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from documents import ROOT, documented

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NAVIGATION = (
    (DOCS.parent / "mkdocs.yml")
    .read_text(encoding="utf-8")
    .partition("nav:")[2]
    .partition("markdown_extensions:")[0]
)


def blocks(page: Path) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


EXECUTED = ["tour", "step", "regularizers", "gymnasium", "meta_tuning", "wide", "cvxpylayers"]


@pytest.mark.parametrize("name", EXECUTED)
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


def test_the_sweep_runs_as_a_script(tmp_path):
    """Worker processes import the script, so it cannot be executed in this one."""
    script, block = tmp_path / "mine.py", blocks(DOCS / "sweeps.md")[0]
    script.write_text(block, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == documented(block), done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_files_and_modules_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    folders = "torch_occ|tests|experiments|docs"
    for path in re.findall(rf"(?<![\w/.])((?:{folders})/[\w/.-]*\w)", text):
        assert (ROOT / path).exists(), path
    assert not re.findall(r"`engine/\S*", text), "the folder engine/ is kernels/ and step/ now"
    for module in re.findall(r"(?<![\w/])python -m (experiments\.[\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for name in re.findall(
        r"\btorch_occ(?:\.[A-Za-z_]\w*)+", re.sub(r"torch_occ[\w/]*\.py", "", text)
    ):
        pkgutil.resolve_name(name)  # raises if it is not there


def test_every_page_is_on_the_site():
    listed = set(re.findall(r"(\S+\.md)$", NAVIGATION, re.MULTILINE))
    assert listed == {str(page.relative_to(DOCS)) for page in PAGES}


def test_every_public_name_is_in_the_reference():
    import torch_occ as occ

    reference = " ".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    whole = {"torch_occ.regularizers.schedules"}  # modules whose every member is shown
    public = {
        name for name, thing in vars(occ).items() if not name.startswith("_") and callable(thing)
    }
    missing = {
        name
        for name in public
        if not re.search(rf"\b{name}\b", reference) and vars(occ)[name].__module__ not in whole
    }
    assert not missing
