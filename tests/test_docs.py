"""The code on the pages of docs/ runs as it stands."""

import re
from pathlib import Path

import pytest

from fedprior.methods import METHODS

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = re.findall(r"```python\n(.*?)```", (DOCS / "new_method.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def registry(monkeypatch):
    """What a page registers is gone afterwards."""
    before = dict(METHODS)
    yield METHODS
    METHODS.clear()
    METHODS.update(before)


def test_a_new_method_takes_at_most_forty_lines():
    assert len(BLOCKS[0].strip().splitlines()) <= 40


def test_the_page_on_a_new_method_runs_as_it_stands(tmp_path, monkeypatch, capsys, registry):
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    for block in BLOCKS:
        exec(compile(block, "docs/new_method.md", "exec"), scope)
    sent = scope["outcome"].curve[-1]["downlink_groups"]
    assert sent["teacher"] == sent["params"] + sent["buffers"] > 0  # cnn has no buffers, so a teacher is as large
    assert "teacher" in capsys.readouterr().out
    assert (tmp_path / "runs" / "digits-slow_teacher" / "report.html").exists()


def test_the_example_is_fedavg_without_its_term(tmp_path, monkeypatch, registry):
    from toy import gap, go

    scope: dict = {}
    exec(compile(BLOCKS[0], "docs/new_method.md", "exec"), scope)
    teacher, plain = (go(m)[0].server for m in (scope["SlowTeacher"](strength=0.0), METHODS["fedavg"]()))
    assert gap(teacher.weights, plain.weights) == 0
    still, engine, _ = go(scope["SlowTeacher"](decay=1.0))
    assert gap(still.server.state["teacher"]["params"], engine.worker.net.init()["params"]) == 0  # it never moves


def test_every_method_and_every_key_stands_on_the_page_of_methods():
    from dataclasses import fields

    page = (DOCS / "methods.md").read_text(encoding="utf-8")
    for name, cls in METHODS.items():
        section = re.search(rf"^### `{name}`\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE)
        assert section, f"docs/methods.md has no section ### `{name}`"
        for f in fields(cls):
            if f.metadata.get("config", True):
                assert f"`{f.name}`" in section.group(1), f"{name}: {f.name}"
