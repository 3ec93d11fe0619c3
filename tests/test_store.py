import json
from pathlib import Path

import pytest

from fedprior import store


def test_a_block_that_raises_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "deep" / "x.json"
    store.write_json(path, {"a": 1})

    def breaks() -> None:
        with store.atomic(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        breaks()
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]


def test_nothing_is_seen_at_the_path_before_the_block_ends(tmp_path):
    path = tmp_path / "x"
    with store.atomic(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    assert path.stat().st_mode & 0o777 == 0o644


def test_json_refuses_numbers_that_json_does_not_have(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        store.write_json(tmp_path / "x.json", {"a": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_digest_tells_its_parts_apart():
    assert store.digest("ab", "c") != store.digest("a", "bc") != store.digest("abc")
    assert store.digest("ä") == store.digest("ä".encode())


def test_a_missing_or_damaged_entry_is_built_and_a_good_one_is_read(tmp_path):
    path = tmp_path / "entry"

    def read(p: Path) -> int:
        return int(p.read_text())

    def build() -> int:
        store.write_text(path, "7")
        return 7

    assert store.read_or_rebuild(path, read, build) == (7, True)
    assert store.read_or_rebuild(path, read, build) == (7, False)
    path.write_text("seven")
    assert store.read_or_rebuild(path, read, build) == (7, True)
    assert path.read_text() == "7"


def test_an_entry_that_could_not_be_read_is_built_and_stays(tmp_path):
    path = tmp_path / "entry"
    path.write_text("whole")

    def read(p: Path) -> str:
        raise OSError(24, "Too many open files")

    assert store.read_or_rebuild(path, read, lambda: "built") == ("built", True)
    assert path.read_text() == "whole"


def test_the_cache_lies_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / "c"))
    assert store.cache_folder() == tmp_path / "c"
    monkeypatch.delenv("FEDPRIOR_CACHE")
    assert store.cache_folder() == Path.home() / ".cache" / "fedprior"
