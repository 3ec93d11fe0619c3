"""Data as columns: a table holds equally long columns, a shard is one client's rows of a shared table.

Every image is stored once, whoever uses it: clients hold row numbers. A batch is a table too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

Table = dict[str, Tensor]
"""Columns of equal length: `image` uint8 [n, 3, H, W], `label` int64 [n], `synthetic` bool [n], `id` int64 [n], and
where the data have domains `domain` int64 [n] (-1: of no domain)."""


def make(
    image: Tensor, label: Tensor, *, domain: Tensor | None = None, synthetic: bool = False, first_id: int = 0
) -> Table:
    """A table from images uint8 [n, 3, H, W], labels int64 [n] and, where there are any, the numbers of domains
    int64 [n]; ids count up from `first_id`."""
    n = len(label)
    if image.dtype != torch.uint8 or image.ndim != 4 or len(image) != n:
        raise ValueError(f"images must be uint8 [n, 3, H, W] with n = {n}, not {image.dtype} {list(image.shape)}")
    made = {
        "image": image,
        "label": label.long(),
        "synthetic": torch.full((n,), synthetic),
        "id": torch.arange(first_id, first_id + n),
    }
    return made if domain is None else made | {"domain": domain.long()}


def take(table: Table, rows: Tensor) -> Table:
    """The given rows of every column."""
    return {name: column.index_select(0, rows) for name, column in table.items()}


def concat(first: Table, second: Table) -> Table:
    """Rows of both tables, which must have the same columns."""
    return {name: torch.cat([column, second[name]]) for name, column in first.items()}


@dataclass(frozen=True)
class Shard:
    """One client's rows of a table that all clients share."""

    table: Table
    rows: Tensor  # int64 [n]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> Tensor:
        """The client's part of a column, as a copy."""
        return self.table[column].index_select(0, self.rows)

    def batch(self, which: Tensor) -> Table:
        """The rows numbered `which` (0 .. n-1 within this shard) as a table."""
        return take(self.table, self.rows.index_select(0, which))


@dataclass(frozen=True, kw_only=True)
class Federation:
    """All clients' data, the test data, and how the split was made."""

    table: Table  # training rows: the real ones first, then synthetic ones
    clients: tuple[Tensor, ...]  # row numbers of each client, int64 [n_k]
    test: Table
    classes: tuple[str, ...]
    domains: tuple[str, ...] = ()  # names, by the numbers in the column `domain`; empty where there is none
    split: dict[str, object] = field(default_factory=dict)  # name, seed, parameters, digest of the partition

    def shard(self, client: int) -> Shard:
        return Shard(self.table, self.clients[client])

    def domain_counts(self, synthetic: bool | None = None) -> np.ndarray:
        """Rows of each domain at each client, int64 [clients, domains], all or only (non-)synthetic ones; rows of no
        domain do not count."""
        out = np.zeros((len(self.clients), len(self.domains)), dtype=np.int64)
        if "domain" in self.table:
            domain = self.table["domain"].cpu().numpy()
            flag = self.table["synthetic"].cpu().numpy()
            for k, rows in enumerate(self.clients):
                r = rows.cpu().numpy()
                held = domain[r if synthetic is None else r[flag[r] == synthetic]]
                out[k] = np.bincount(held[held >= 0], minlength=len(self.domains))
        return out

    def counts(self, synthetic: bool | None = None) -> np.ndarray:
        """Rows of each class at each client, int64 [clients, classes]; all rows, or only (non-)synthetic ones."""
        out = np.zeros((len(self.clients), len(self.classes)), dtype=np.int64)
        label, flag = self.table["label"].cpu().numpy(), self.table["synthetic"].cpu().numpy()
        for k, rows in enumerate(self.clients):
            r = rows.cpu().numpy()
            if synthetic is not None:
                r = r[flag[r] == synthetic]
            out[k] = np.bincount(label[r], minlength=len(self.classes))
        return out

    def with_rows(self, extra: Table, rows: Sequence[Tensor]) -> "Federation":
        """A federation with `extra` appended to the table; rows[k] are client k's numbers within `extra`. Rows that
        say no domain are of none."""
        offset = len(self.table["label"])
        if "domain" in self.table and "domain" not in extra:
            extra = extra | {"domain": torch.full_like(extra["label"], -1)}
        clients = tuple(torch.cat([old, new + offset]) for old, new in zip(self.clients, rows, strict=True))
        return replace(self, table=concat(self.table, extra), clients=clients)

    def only(self, clients: Sequence[int]) -> "Federation":
        """With these clients' rows alone; the others have none."""
        mine = [rows if k in clients else rows[:0] for k, rows in enumerate(self.clients)]
        used, where = torch.cat(mine).unique(return_inverse=True)
        parts = where.split([len(rows) for rows in mine])
        return replace(self, table=take(self.table, used), clients=tuple(parts))

    def to(self, device: torch.device) -> "Federation":
        def move(table: Table) -> Table:
            return {name: column.to(device) for name, column in table.items()}

        return replace(
            self,
            table=move(self.table),
            test=move(self.test),
            clients=tuple(r.to(device) for r in self.clients),
        )
