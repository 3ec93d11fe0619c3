"""Settings are searched on rows that clients hold out, never on the test set."""

from dataclasses import replace

import torch

from .. import seeds
from .table import Federation, take


def hold_out(federation: Federation, share: float, seed: int) -> Federation:
    """The federation without a random `share` of each client's rows (rounded; a client keeps one row at least), which
    take the test table's place."""
    kept, held = [], []
    for client, rows in enumerate(federation.clients):
        order = torch.from_numpy(seeds.stream(seed, "validation", client).permutation(len(rows)))
        count = min(round(share * len(rows)), max(0, len(rows) - 1))
        held.append(rows[order[:count].sort().values])
        kept.append(rows[order[count:].sort().values])
    return replace(federation, clients=tuple(kept), test=take(federation.table, torch.cat(held).sort().values))
