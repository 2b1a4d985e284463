"""The documentation is true: its code runs and prints what it says, its links lead somewhere.

Every page is on the site, its formulas can be typeset, and nothing comes from another host.
"""

import ast
import inspect
import io
import os
import pkgutil
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from documents import ROOT, anchors, documented

import torch_occ as occ
from notebooks.make import FOLDER, SCRIPT, SOURCES, cells, notebook

DOCS = ROOT / "docs"
ASSETS = DOCS / "assets"
PAGES = sorted(DOCS.rglob("*.md"))
EXECUTED = [
    str(page.relative_to(DOCS).with_suffix(""))
    for page in PAGES
    if "\n```python\n" in page.read_text(encoding="utf-8")
]
SETTINGS = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
NAVIGATION = SETTINGS.partition("nav:")[2].partition("markdown_extensions:")[0]
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(?!\s)([^$]+)(?<!\s)\$", re.DOTALL)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))


def blocks(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def without_code(text: str) -> str:
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^(?: {4,}\S.*\n?)+|`[^`]*`", "", text, flags=re.MULTILINE)


def prose(page: Path) -> str:
    return without_code(page.read_text(encoding="utf-8"))


# torch hides these two of its own from users; its compiler causes them.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("name", EXECUTED)
def test_examples_run_and_print_what_they_say(name):
    """Where a page has a notebook, the cells of the notebook run; they are those of the page."""
    page = DOCS / f"{name}.md"
    made = [cells(notebook) for notebook, source in SOURCES.items() if source == name]
    examples = made[0] if made else [(block, documented(block)) for block in blocks(page)]
    session: dict[str, object] = {"__name__": name}
    assert examples
    for number, (code, outputs) in enumerate(examples):
        if SCRIPT in code:
            continue
        output = io.StringIO()
        with redirect_stdout(output):
            exec(compile(code, f"{page.name}, example {number}", "exec"), session)
        assert output.getvalue().splitlines() == outputs, code


def test_notebooks_are_made_from_the_pages():
    found = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.ipynb")}
    made = {name: notebook(name) for name in SOURCES}
    assert found == made, "run: python notebooks/make.py"
    for name, page in SOURCES.items():
        examples = [block for block in blocks(DOCS / f"{page}.md") if SCRIPT not in block]
        assert [outputs for _, outputs in cells(name)] == [documented(x) for x in examples]
        for target in re.findall(r"\]\((\.\./[^)#\s]+)", found[name]):
            assert (FOLDER / target).exists(), target


@each_page
def test_examples_compile_and_links_lead_somewhere(page):
    for number, block in enumerate(blocks(page)):
        compile(block, f"{page.name}, example {number}", "exec")
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    for target in inline + re.findall(r"^\[[^\]]+\]: ([^#\s]+)", text, re.MULTILINE):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_sweep_runs_as_a_script(tmp_path):
    """Worker processes import the script, so it cannot be executed in this one."""
    script = tmp_path / "mine.py"
    (block,) = (block for page in PAGES for block in blocks(page) if SCRIPT in block)
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


@each_page
def test_files_and_modules_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    folders = "torch_occ|tests|experiments|docs"
    for path in re.findall(rf"(?<![\w/.])((?:{folders})/[\w/.-]*\w)", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"(?<![\w/])python -m (experiments\.[\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for name in re.findall(
        r"\btorch_occ(?:\.[A-Za-z_]\w*)+", re.sub(r"torch_occ[\w/]*\.py", "", text)
    ):
        pkgutil.resolve_name(name)  # raises if it is not there


def test_every_page_is_on_the_site_and_home_links_it():
    names = {str(page.relative_to(DOCS)) for page in PAGES}
    assert set(re.findall(r"(\S+\.md)$", NAVIGATION, re.MULTILINE)) == names
    home = (DOCS / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\S+\.md)\)", home)) == names - {"index.md"}


@each_page
def test_lines_are_short(page):
    """A line that is one link or one row of a table cannot be wrapped."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [x for x in lines if len(x) > 100 and not x.lstrip().startswith(("|", "![", "["))]


@each_page
def test_anchors_are_headings(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", prose(page)):
        if not target.startswith("https://"):
            assert anchor in anchors((page.parent / (target or page.name)).read_text("utf-8"))


@each_page
def test_formulas_can_be_typeset(page):
    """Known commands and balanced brackets; a single dollar sign is a formula without an end."""
    katex = (ASSETS / "katex/katex.min.js").read_text(encoding="utf-8")
    known = {*re.findall(r'"\\(\\[A-Za-z]+)"', katex), r"\end", r"\middle"}
    for block, inline in FORMULA.findall(prose(page)):
        formula = block or inline
        assert set(re.findall(r"\\[A-Za-z]+", formula)) <= known, formula
        for start, end in [("{", "}"), (r"\\left\b", r"\\right\b"), (r"\\begin\b", r"\\end\b")]:
            assert len(re.findall(start, formula)) == len(re.findall(end, formula)), formula
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
    loaded = re.compile(r"!\[[^\]]*\]\(\w+:|\bsrc=[\"']?\w*:?//|<(?:script|link|iframe)\b")
    assert not [page for page in PAGES if loaded.search(prose(page))]


def reference() -> dict[str, object]:
    """What the reference shows, by the path behind `:::`."""
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    paths = re.findall(r"^::: (\S+)", text, re.MULTILINE)
    assert len(paths) == len(set(paths))
    return {path: pkgutil.resolve_name(path) for path in paths}


PACKAGES = [occ, occ.mdp, occ.step, occ.game, occ.rivals, occ.limits, occ.tuning, occ.theory]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(package):
    public = {
        f"{package.__name__}.{name}"
        for name in getattr(package, "__all__", vars(package))
        if not name.startswith("_") and not inspect.ismodule(getattr(package, name))
    }
    assert public <= set(reference())


def test_the_reference_has_something_to_show():
    """mkdocstrings leaves out what has no docstring, without a warning."""
    assert not [name for name, thing in reference().items() if not inspect.getdoc(thing)]


def docstrings(module: Path) -> list[str]:
    nodes = ast.walk(ast.parse(module.read_text(encoding="utf-8")))
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [ast.get_docstring(node) or "" for node in nodes if isinstance(node, owners)]


def test_formulas_are_not_taken_for_html():
    """The site drops `<q, loss>` as an unknown tag; it shows ⟨q, loss⟩ and `a < b`."""
    texts = [(page, prose(page)) for page in PAGES]
    for module in sorted((ROOT / "torch_occ").rglob("*.py")):
        texts += [(module, without_code(text)) for text in docstrings(module)]
    found = [(path, re.findall(r"<[A-Za-z/?].{,30}", text)) for path, text in texts]
    assert not [(str(path.relative_to(ROOT)), tags) for path, tags in found if tags]
