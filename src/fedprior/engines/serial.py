"""One client after another: the engine that specifies what the others must compute."""

from collections.abc import Iterable, Sequence

from ..data.table import Federation
from ..local import Worker
from ..tree import Tree
from ..uploads import Upload


class Serial:
    def __init__(self, worker: Worker, federation: Federation) -> None:
        self.worker, self.federation = worker, federation
        self.clients: Sequence[int] = [k for k, rows in enumerate(federation.clients) if len(rows)]
        self.total = len(federation.clients)
        self.memory: dict[int, Tree] = {}
        self.pending: dict[int, Tree] = {}

    def train(self, down: Tree, cohort: Sequence[int], round: int) -> Iterable[Upload]:
        for client in sorted(cohort):
            shard, memory = self.federation.shard(client), self.memory.get(client, {})
            try:
                upload, self.pending[client] = self.worker.train(client, shard, down, memory, round)
            except Exception as error:
                error.add_note(f"in client {client}, round {round + 1}")
                raise
            yield upload

    def commit(self, accepted: Sequence[int]) -> None:
        self.memory |= {k: self.pending[k] for k in accepted if any(self.pending[k].values())}
        self.pending = {}

    def expected(self, down: Tree) -> Tree:
        return self.worker.expected(down, self.federation.shard(self.clients[0]))

    def start(self, client: int, down: Tree) -> Tree:
        """The weights that a client would begin a round with."""
        return self.worker.open(down, self.memory.get(client, {})).start
