"""What travels between server and clients, counted by tensor group. 1 MB = 1e6 bytes."""

from collections import Counter
from dataclasses import dataclass, field

from . import tree
from .tree import Tree

MB = 1e6


@dataclass
class Traffic:
    """Bytes since the first round, as sent without compression."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)

    def sent(self, message: Tree, receivers: int) -> None:
        """A message {"weights": {...}, "shared": {...}} went to this many clients."""
        for name, part in (message["weights"] | message["shared"]).items():
            self.down[name] += receivers * tree.num_bytes({name: part})

    def received(self, upload: Tree) -> None:
        """An upload {"method": {...}, "buffers": {...}} came in."""
        parts = upload["method"] | {k: v for k, v in upload.items() if k != "method"}
        for name, part in parts.items():
            self.up[name] += tree.num_bytes({name: part})
