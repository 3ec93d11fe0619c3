"""The one atomic writer and the one checked reader, and where caches live."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def cache_folder() -> Path:
    """FEDPRIOR_CACHE if it is set, else ~/.cache/fedprior."""
    return Path(os.environ.get("FEDPRIOR_CACHE") or Path.home() / ".cache" / "fedprior")


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; when the block ends well, it becomes `path` in one step.

    The file is flushed to disk first. When the block raises, nothing at `path` changes and the
    temporary file is gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as f:
            os.fsync(f.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Strict JSON (no NaN), keys in the order given, a final newline."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def digest(*parts: bytes | str) -> str:
    """SHA-256 over parts, each preceded by its length, so that ("ab", "c") differs from ("a", "bc")."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "big"))
        h.update(data)
    return h.hexdigest()


def read_or_rebuild(path: Path, read: Callable[[Path], T], build: Callable[[], T]) -> tuple[T, bool]:
    """-> (value, whether it was built). A missing cache entry is built; so is one that `read` finds damaged
    (`read` says so by raising ValueError or OSError)."""
    if path.exists():
        try:
            return read(path), False
        except (ValueError, OSError):
            path.unlink(missing_ok=True)
    return build(), True
