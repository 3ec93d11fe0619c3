"""Where clients run. An engine turns (message, cohort, round) into uploads."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..tree import Tree
from ..uploads import Refusal, Upload


class Engine(Protocol):
    """Where clients run, and what `federate` asks of it."""

    @property
    def clients(self) -> Sequence[int]:
        """Ids of the clients that hold data, ascending."""
        ...

    @property
    def total(self) -> int:
        """All clients, with or without data."""
        ...

    def train(self, down: Tree, cohort: Sequence[int], round: int) -> Iterable[Upload | Refusal]:
        """One upload a client of the cohort, or why there is none, in ascending order of ids."""
        ...

    def commit(self, accepted: Sequence[int], round: int) -> None:
        """These clients' uploads counted: what they remember of the round becomes current. The others forget it."""
        ...

    def expected(self, down: Tree) -> Tree:
        """A tree with the names, shapes and dtypes of a good upload."""
        ...
