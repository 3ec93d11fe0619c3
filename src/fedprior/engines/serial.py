"""One client after another: the engine that specifies what the others must compute."""

from collections.abc import Iterable, Sequence

from ..data.table import Federation
from ..evaluate import Evaluation, evaluate
from ..local import Worker
from ..memory import ClientMemory
from ..store import weight_digest
from ..tree import Tree
from ..uploads import Refusal, Upload


class Serial:
    """All clients in this process, in the order of ids. Uploads come as they are made, one held at a time."""

    def __init__(self, worker: Worker, federation: Federation, memory: ClientMemory | None = None) -> None:
        self.worker, self.federation = worker, federation
        self.clients: Sequence[int] = [k for k, rows in enumerate(federation.clients) if len(rows)]
        self.total = len(federation.clients)
        self.memory = memory or ClientMemory()

    def train(self, down: Tree, cohort: Sequence[int], round: int) -> Iterable[Upload | Refusal]:
        """What each client of the cohort sends, in the order of ids, or why it sends nothing."""
        for client in sorted(cohort):
            try:
                upload, memory = self.worker.train(
                    client, self.federation.shard(client), down, self.memory.get(client), round
                )
            except Exception as error:
                error.add_note(f"in client {client}, round {round + 1}")
                raise
            self.remember(round, client, memory)
            yield upload

    def remember(self, round: int, client: int, memory: Tree) -> None:
        """Until the round's `commit`, which says whether it counts."""
        if any(memory.values()):
            self.memory.stage(round, client, memory)

    def commit(self, accepted: Sequence[int], round: int) -> None:
        self.memory.commit(round, accepted)

    def expected(self, down: Tree) -> Tree:
        return self.worker.sample(down, self.federation.shard(self.clients[0]))[0].tree

    def personal(self, clients: Sequence[int], weights: Tree) -> dict[int, Evaluation]:
        """Of the models that clients would begin a round with, each on the test table."""
        return {k: self.evaluate(self.start(k, weights)) for k in clients}

    def kept(self) -> dict[int, str]:
        """A digest of what each client keeps of the model."""
        return {k: weight_digest(self.memory.get(k)["kept"]) for k in self.memory if self.worker.kept}

    def models(self, weights: Tree) -> Iterable[Tree] | None:
        """The weights that each client would begin a round with; None where they are not here."""
        return (self.start(k, weights) for k in self.clients)

    def start(self, client: int, weights: Tree) -> Tree:
        """The weights that a client would begin a round with, given the server's."""
        return self.worker.assemble(weights, self.memory.get(client))

    def evaluate(self, weights: Tree) -> Evaluation:
        """Of a model on the test table."""
        return evaluate(self.worker.net, weights, self.federation.test, len(self.federation.classes))

    def close(self) -> None:
        """Ends what the engine has running beside this process: here nothing."""
