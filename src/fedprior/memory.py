"""What clients remember between their rounds: in memory up to a limit, the rest on disk.

With a folder every new memory is written to a file of its own at once, CLIENT-ROUND.safetensors, and an older
file stays until no checkpoint names it. The limit bounds what is kept in memory on top; results do not depend
on it, since a tree read back equals the one that was written to the bit.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
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
        self.held: OrderedDict[int, Tree] = OrderedDict()  # least recently used first
        self.bytes = 0

    def __contains__(self, client: int) -> bool:
        return client in self.index

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.index))

    def get(self, client: int) -> Tree:
        """{} for a client that remembers nothing. Raises UserError when its file is damaged."""
        if client not in self.index:
            return {}
        if client in self.held:
            self.held.move_to_end(client)
            return self.held[client]
        try:
            memory = self.read(client, self.index[client])
        except (OSError, ValueError) as error:
            raise UserError(f"what client {client} remembers cannot be read: {error}; run again to resume") from None
        self._hold(client, memory)
        return memory

    def put(self, round: int, memories: Mapping[int, Tree]) -> None:
        """What these clients remember after a round."""
        for client, memory in memories.items():
            if self.folder is not None:
                store.write_tree(self._path(client, round), memory)
            self.index[client] = round
            self._hold(client, memory)

    def restore(self, index: Index) -> None:
        """Go on from these files. Raises ValueError or OSError when one is missing or damaged."""
        for client, round in index.items():
            self.read(client, round)
        self.index = dict(index)
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

    def _hold(self, client: int, memory: Tree) -> None:
        if client in self.held:
            self.bytes -= tree.num_bytes(self.held.pop(client))
        self.held[client] = memory
        self.bytes += tree.num_bytes(memory)
        while self.bytes > self.limit:
            self.bytes -= tree.num_bytes(self.held.popitem(last=False)[1])
