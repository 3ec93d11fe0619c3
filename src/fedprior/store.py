"""The one atomic writer and the one checked reader, and where caches live."""

import errno
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from .tree import Tree

T = TypeVar("T")
DEEPEST = 32  # levels of a tree in a message


def cache_folder() -> Path:
    """FEDPRIOR_CACHE if it is set, else ~/.cache/fedprior."""
    return Path(os.environ.get("FEDPRIOR_CACHE") or Path.home() / ".cache" / "fedprior")


@contextmanager
def atomic(path: Path, mode: int = 0o644) -> Iterator[Path]:
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
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sweep(folder: Path, older: float = 0.0) -> None:
    """Removes what `atomic` left under a folder when its process was killed, where nothing wrote to it for `older`
    seconds. With 0 only for who alone writes there."""
    for path in folder.rglob(".*.tmp"):
        with suppress(FileNotFoundError):  # somebody else swept it
            if time.time() - path.stat().st_mtime >= older:
                path.unlink()


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    with atomic(path, mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Strict JSON (no NaN), keys in the order given, a final newline."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError for anything else in the file, OSError where it cannot be read."""
    value = json.loads(path.read_text(encoding="utf-8"))  # both of its errors are ValueErrors
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def save_tensors(flat: "dict[str, Tensor]", path: Path, notes: dict[str, str]) -> None:
    """safetensors' save_file at once to `path`, whose full disk is an OSError like any other."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with atomic(path) as temporary:
        try:
            save_file(flat, temporary, metadata=notes)
        except SafetensorError as error:
            if f"os error {errno.ENOSPC}" in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
            raise


def digest(*parts: bytes | str) -> str:
    """SHA-256 over parts, each preceded by its length, so that ("ab", "c") differs from ("a", "bc")."""
    h = hashlib.sha256()
    for part in parts:
        _add(h, part)
    return h.hexdigest()


def _add(h: "hashlib._Hash", part: bytes | str | memoryview) -> None:
    data = part.encode() if isinstance(part, str) else part
    h.update(len(data).to_bytes(8, "big"))
    h.update(data)


def read_or_rebuild(path: Path, read: Callable[[Path], T], build: Callable[[], T]) -> tuple[T, bool]:
    """-> (value, whether it was built). A missing cache entry is built; so is one that `read` finds damaged, which
    it says by raising ValueError and which is removed. Where it raises OSError (a bad disk, too many open files), what
    is there may be whole: it is built too, but stays until something is written in its place."""
    if path.exists():
        try:
            return read(path), False
        except ValueError:
            path.unlink(missing_ok=True)
        except OSError:
            pass
    return build(), True


def write_tree(path: Path, value: "Tree", about: dict[str, Any] | None = None) -> None:
    """A tree of tensors and JSON values about it as one safetensors file with a digest inside."""
    flat = _laid_out(value)
    note = json.dumps(about or {}, allow_nan=False)
    save_tensors(flat, path, {"about": note, "order": _order(flat), "digest": _tree_digest(flat, note)})


def tree_bytes(value: "Tree") -> bytes:
    """A tree as the content of a safetensors file, for a message."""
    from safetensors.torch import save

    flat = _laid_out(value)
    return save(flat, {"order": _order(flat)})


def tree_from(data: bytes) -> "Tree":
    """What `tree_bytes` made it of. Raises ValueError for anything else."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    from . import tree

    try:
        length = int.from_bytes(data[:8], "little")
        order = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["order"])
        flat = load(data)
        if sorted(order) != sorted(flat):
            raise ValueError("its order names other tensors")
        if any(name.count("/") > DEEPEST for name in order):
            raise ValueError("its tensors are nested too deeply")
        return tree.unflatten({name: flat[name] for name in order})
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"no tree: {error}") from None


def _laid_out(value: "Tree") -> "dict[str, Tensor]":
    """A tree's tensors as the format wants them."""
    from . import tree

    flat: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, x in tree.flatten(value).items():
        flat[name] = x.detach().cpu().contiguous()
        if flat[name].untyped_storage().data_ptr() in seen:  # the format knows no shared tensors
            flat[name] = flat[name].clone()
        seen.add(flat[name].untyped_storage().data_ptr())
    return flat


def _order(flat: "dict[str, Tensor]") -> str:
    """The format has an order of its own, and sums depend on ours."""
    return json.dumps(list(flat))


def read_tree(path: Path, copy: bool = True, check: bool = True) -> tuple["Tree", dict[str, Any]]:
    """-> (tree, about) as written. Raises ValueError or OSError for a file that is damaged or missing.

    Without `copy` the tensors are the mapped file, which must not be written. Without `check` nobody looks whether it
    is damaged, and they take no memory until they are used.
    """
    from safetensors import SafetensorError, safe_open

    from . import tree

    try:
        with safe_open(path, framework="pt") as f:
            notes = f.metadata() or {}
            flat = {name: f.get_tensor(name) for name in json.loads(notes["order"])}
            flat = {name: x.clone() for name, x in flat.items()} if copy else flat
            about = json.loads(notes["about"])
    except (SafetensorError, KeyError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if check and _tree_digest(flat, notes["about"]) != notes.get("digest"):
        raise ValueError(f"{path} is damaged: its digest does not fit its content")
    return tree.unflatten(flat), about


def _tree_digest(flat: "dict[str, Tensor]", note: str) -> str:
    h = hashlib.sha256()
    _add(h, note)
    for name, x in flat.items():
        _add(h, f"{name} {x.dtype} {list(x.shape)}")
        _add(h, _flat_bytes(x))
    return h.hexdigest()


def weight_digest(weights: "Tree") -> str:
    """SHA-256 over names and values of all tensors: equal digests mean equal models."""
    from . import tree

    parts: list[bytes | str] = []
    for name, x in sorted(tree.flatten(weights).items()):
        parts += [name, raw_bytes(x)]
    return digest(*parts)


def raw_bytes(x: "Tensor") -> bytes:
    """A tensor's values in memory order of a contiguous copy."""
    return _flat_bytes(x).tobytes()


def _flat_bytes(x: "Tensor") -> memoryview:
    """The same without a copy where the tensor is contiguous on a CPU."""
    import torch

    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
