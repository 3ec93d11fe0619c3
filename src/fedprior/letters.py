"""What a server and its nodes say to each other, whatever carries it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .tree import Tree


@dataclass(frozen=True)
class Letter:
    """Plain values (as in JSON, and NaN) and named trees of tensors. Nothing else travels."""

    facts: dict[str, Any] = field(default_factory=dict)
    trees: dict[str, Tree] = field(default_factory=dict)


class Answer(NamedTuple):
    """What came of a letter."""

    number: str  # of the letter that it answers
    letter: Letter | None  # None where there is only an error
    error: str = ""


class Post(Protocol):
    """Carries letters from the server to nodes, and answers back. A node has a number; the same node has the same one
    whenever it is there."""

    def nodes(self) -> Collection[int]:
        """Those that can be reached now."""
        ...

    def send(self, letters: Sequence[tuple[int, str, Letter]], seconds: float) -> list[str]:
        """Sends (node, kind, letter) each -> their numbers. Answers are taken for longer than so many seconds, since a
        late one says that its node is free again."""
        ...

    def collect(self, numbers: Collection[str]) -> Sequence[Answer]:
        """The answers to these letters that are there by now; each is given out once."""
        ...
