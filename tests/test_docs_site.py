"""The documentation site: its pages' code and commands run as they stand, its names exist, its links resolve."""

import ast
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedprior.methods import METHODS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "fedprior"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
COMING_FROM = sorted((DOCS / "coming_from").glob("*.md"))
BLOCK = re.compile(r"(<!-- not run by the tests.*? -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BY_HAND = "not run"


def blocks(page):
    """(language, text) of each code block of a page; the language is BY_HAND where the page says so."""
    return [(BY_HAND if apart else kind, text) for apart, kind, text in BLOCK.findall(page.read_text(encoding="utf-8"))]


def commands(text):
    """(command, what it prints) of each command of a console block."""
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in re.split(r"^\$ ", text, flags=re.M)[1:]]


def masked(text):
    """The lines of a text without what differs from run to run: numbers, digests and widths."""
    text = re.sub(r"\d[\da-f.,]*", "#", text).replace("# min # s", "# s").replace("# s", "#")
    lines = (re.sub(r"[\s─]+", " ", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


def assert_printed(shown, printed):
    """The lines that a page shows come in this order in what was printed; a line "..." stands for any others."""
    left = iter(masked(printed))
    for line in masked(shown):
        assert line == "..." or any(line == other for other in left), f"{line!r} is not in:\n{printed}"


def carry_out(command):
    """What a command prints on both streams; those of fedprior run in this process."""
    if not command.startswith("fedprior "):
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr
    from fedprior import cli

    out = io.StringIO()
    before, sys.argv = sys.argv, shlex.split(command)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            cli.main()
    except SystemExit as end:
        if end.code:
            pytest.fail(f"{command}: {out.getvalue()}")
    finally:
        sys.argv = before
    return out.getvalue()


def walk(page, scope):
    """Runs a page from its top to its end: code, what it prints, and commands."""
    printed = ""
    for kind, text in blocks(page):
        if kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(text, str(page), "exec"), scope)
            printed = out.getvalue()
        elif kind == "text":
            assert_printed(text, printed)
        elif kind == "console":
            for command, shown in commands(text):
                assert_printed(shown, carry_out(command))


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """An empty folder to run a page in, on a terminal of the width of the pages'."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    before = dict(METHODS)
    yield tmp_path
    METHODS.clear()
    METHODS.update(before)


def test_the_pages_on_data_and_priors_run_as_they_stand(own_folder):
    scope: dict = {}
    walk(DOCS / "extend" / "data_set.md", scope)
    walk(DOCS / "extend" / "prior.md", {})  # goes on in the same folder, as it says
    assert scope["found"].classes == ("circle", "square")


@pytest.mark.slow
@pytest.mark.parametrize("page", [*TUTORIALS, *COMING_FROM], ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_it_shows(page, own_folder):
    walk(page, {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert cells[0]["cell_type"] == "markdown"
    for cell in cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_top_to_its_end(path, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(path, as_version=4)
    kernels = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=kernels).execute()
    assert any(cell.get("outputs") for cell in notebook.cells)


def defined(dotted):
    """(source of the module, node) of a class or function of the package, found without importing it."""
    parts = dotted.split(".")[1:]
    for n in range(len(parts), 0, -1):
        path = SOURCE.joinpath(*parts[:n])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.exists():
            break
    else:
        pytest.fail(f"no module of fedprior is in {dotted}")
    text = path.read_text(encoding="utf-8")
    node = ast.parse(text)
    for name in parts[n:]:
        node = next((child for child in node.body if getattr(child, "name", None) == name), None)
        assert node is not None, f"{path} defines no {dotted}"
    return text, node


SHOWN = {  # dotted name -> page of the API
    name: page
    for page in sorted((DOCS / "api").glob("*.md"))
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize("dotted", SHOWN)
def test_what_the_api_shows_exists_and_says_what_it_is(dotted):
    assert ast.get_docstring(defined(dotted)[1]), f"{dotted} has no docstring"


def test_everything_that_has_a_name_on_the_command_line_is_in_the_api():
    from fedprior.aggregate import AGGREGATES
    from fedprior.data.partition import PARTITIONS
    from fedprior.guide import GUIDES
    from fedprior.optim import OPTIMIZERS, SERVER_OPTIMIZERS
    from fedprior.prepare.balance import BALANCES
    from fedprior.schedule import SCHEDULES

    named = {**OPTIMIZERS, **SERVER_OPTIMIZERS}
    for registry in (METHODS, PARTITIONS, BALANCES, AGGREGATES, SCHEDULES, GUIDES, named):
        for cls in registry.values():
            assert f"{cls.__module__}.{cls.__name__}" in SHOWN


def test_the_api_lists_all_that_the_package_offers():
    import fedprior

    page = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    for name in fedprior.__all__:
        assert name.startswith("__") or f"`fedprior.{name}`" in page


EQUATIONS = re.findall(
    r"\[`([\w.]+)`\]\(api/(\w+)\.md#([\w.]+)\):\n\n```python\n(.*?)```",
    (DOCS / "equations.md").read_text(encoding="utf-8"),
    re.DOTALL,
)


@pytest.mark.parametrize(("label", "page", "dotted", "code"), EQUATIONS, ids=[label for label, *_ in EQUATIONS])
def test_a_line_beside_an_equation_stands_in_the_named_place(label, page, dotted, code):
    owner, _, member = label.partition(".")
    assert dotted.rpartition(".")[2] == owner
    assert SHOWN[dotted].stem == page
    text, node = defined(f"{dotted}.{member}" if member else dotted)
    # of comments such as shapes a page has none
    lines = [re.sub(r"  #.*", "", line).strip() for line in ast.get_source_segment(text, node).splitlines()]
    for line in code.splitlines():
        assert line in lines, f"{label} has no line: {line}"


def test_every_method_has_its_equation():
    heads = re.findall(r"^## (.*)$", (DOCS / "equations.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for head in heads for name in re.findall(r"`(\w+)`", head)} == set(METHODS)


def test_the_index_of_results_lists_every_record():
    folder = DOCS / "records"
    listed = re.findall(r"^\| \[[^]]*\]\(([^)]*)\) \|", (folder / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    there = {path.name for path in folder.iterdir()} - {"index.md"}
    assert there == {name for name in listed if "/" not in name}
    assert all((folder / name).exists() for name in listed)


OFFLINE = """
import socket, sys

def refused(*_, **__):
    raise OSError("the site needs no network")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refused
from mkdocs.__main__ import cli
cli(["build", "--strict", "--site-dir", sys.argv[1]])
"""
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//|<link[^>]*\shref=[\"']?(?:https?:)?//"
)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_without_a_network(tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(module)
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert not [name for name, text in pages.items() if FETCHED.search(text)]
    assert not [path for path in site.rglob("*.css") if re.search(r"url\([\"']?(https?:)?//", path.read_text())]
    assert 'id="fedprior.methods.scaffold.Scaffold"' in pages["api/methods.html"]
