"""What the README shows must work: its examples run or at least parse, its links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from fedprior.cli import experiment_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^fedprior (?:run|plan|generate) (.*?)(?:\s+#.*)?$", README, re.MULTILINE)


def test_the_python_example_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert 0 < float(capsys.readouterr().out) <= 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_an_experiment(command):
    words = [w for w in shlex.split(command) if w != "..."]
    assert experiment_of(words).rounds > 0


def test_commands_were_found():
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("page", sorted([ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")]))
def test_local_links_and_pictures_exist(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
