"""What clients remember between their rounds: in memory up to a limit, the rest on disk.

With a folder every new memory is written to a file of its own at once, CLIENT-ROUND.safetensors, and an older
file stays until no checkpoint names it. The limit bounds what is kept in memory on top, however large a cohort
is; results do not depend on it, since a tree read back equals the one that was written to the bit.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

from . import store, tree
from .errors import UserError
from .net import layout
from .traffic import MB
from .tree import Tree

Index = dict[int, int]
"""Client -> the round (from 0) after which it remembered what it does now."""


class ClientMemory:
    """Trees by client. Without a folder all of them stay in memory."""

    def __init__(self, folder: Path | None = None, limit_MB: float = float("inf")) -> None:
        self.folder, self.limit = folder, limit_MB * MB if folder else float("inf")
        self.index: Index = {}
        self.staged: set[int] = set()  # clients whose new memory does not count yet
        self.held: OrderedDict[tuple[int, int], Tree] = OrderedDict()  # by client and round, least recently used first
        self.bytes = 0

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.index))

    def get(self, client: int) -> Tree:
        """{} for a client that remembers nothing. Raises UserError when its file is damaged."""
        if client not in self.index:
            return {}
        key = client, self.index[client]
        if key in self.held:
            self.held.move_to_end(key)
            return self.held[key]
        try:
            memory = self.read(*key)
        except (OSError, ValueError) as error:
            raise UserError(f"what client {client} remembers cannot be read: {error}; run again to resume") from None
        self._hold(key, memory)
        return memory

    def stage(self, round: int, client: int, memory: Tree) -> None:
        """What a client remembers after a round, if its upload turns out to count."""
        if self.folder is not None:
            store.write_tree(self._path(client, round), memory)
        self._hold((client, round), memory)
        self.staged.add(client)

    def commit(self, round: int, accepted: Iterable[int]) -> None:
        """The staged memories of these clients become current; the others are forgotten."""
        for client in self.staged.intersection(accepted):
            if self.index.get(client) != round:
                self._drop((client, self.index.get(client, -1)))
            self.index[client] = round
            self.staged.remove(client)
        for client in self.staged:
            self._drop((client, round))
        self.staged = set()

    def restore(self, index: Index) -> None:
        """Go on from these files. Raises ValueError or OSError when one is missing or damaged."""
        for client, round in index.items():
            self.read(client, round)
        self.index, self.staged = dict(index), set()
        self.held.clear()
        self.bytes = 0

    def prune(self, *needed: Index) -> None:
        """Removes every file that none of these indices names."""
        if self.folder is not None and self.folder.exists():
            keep = {self._path(client, round) for index in needed for client, round in index.items()}
            for path in self.folder.glob("*.safetensors"):
                if path not in keep:
                    path.unlink(missing_ok=True)

    def read(self, client: int, round: int) -> Tree:
        return layout(store.read_tree(self._path(client, round))[0])

    def _path(self, client: int, round: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{client}-{round}.safetensors"

    def _hold(self, key: tuple[int, int], memory: Tree) -> None:
        self._drop(key)
        self.held[key] = memory
        self.bytes += tree.num_bytes(memory)
        while self.bytes > self.limit:
            self._drop(next(iter(self.held)))

    def _drop(self, key: tuple[int, int]) -> None:
        if key in self.held:
            self.bytes -= tree.num_bytes(self.held.pop(key))
