"""FedSC (Wang et al., KDD 2025): clients' class prototypes steer training, one by one and merged.

    relational  r_kc = (p_kc + p_jc) / 2, j the owner of class c whose prototype is nearest to p_kc
    consistent  q_c = sum_k e_k r_kc / sum_k e_k over owners, e_k = sigmoid(n_k / sum n - d_k / sum d),
                d_k = sqrt(sum_c (share of c at k - 1/C)^2 / 2)
    client      CE + InfoNCE_T(z; mean_k r_ky against all r_kc, c != y) + MSE(z, q_y)

There are no prototypes before round 2; a class without any has neither term. The authors' released code differs:
it takes the first other owner as the nearest one and matches e_k to owners by position.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.table import Shard, Table
from ..method import Aggregate, Context, Method, Result, Round, Server
from ..net import Net, Output
from ..tree import Tree
from .checks import above_zero, at_least
from .prototypes import class_means, distance_to


@dataclass(frozen=True, kw_only=True)
class FedSC(Method):
    """`contrast` and `consistency` weigh the two terms, `temperature` is T. Clients also send their class counts."""

    contrast: float = 1.0
    consistency: float = 1.0
    temperature: float = 0.05

    def __post_init__(self) -> None:
        at_least(0, contrast=self.contrast, consistency=self.consistency)
        above_zero(temperature=self.temperature)

    def init_server(self, net: Net, weights: Tree, seed: int) -> Tree:
        none = torch.zeros(0, net.classes, net.width, device=net.device, dtype=net.dtype)
        return collaborate(none, torch.zeros(0, net.classes))

    def broadcast(self, server: Server) -> Tree:
        return server.state

    def loss(self, weights: Tree, batch: Table, ctx: Context) -> tuple[Tensor, Output]:
        loss, out = super().loss(weights, batch, ctx)
        relational, owned = ctx.shared["relational"], ctx.shared["owned"]  # [M, K, D], [M, K]
        if not len(relational):
            return loss, out
        z, label, known = out.features, batch["label"], owned.any(0)
        centre = relational.sum(0) / owned.sum(0).clamp(min=1)[:, None]  # [K, D]
        positive = F.cosine_similarity(z, centre[label], dim=-1)  # [B]
        others = F.normalize(z, dim=-1) @ F.normalize(relational, dim=-1).flatten(0, 1).T  # [B, M K]
        classes = torch.arange(owned.shape[1], device=z.device)
        negative = owned[None] & (classes[None, None] != label[:, None, None])  # [B, M, K]
        others = others.masked_fill(~negative.flatten(1), float("-inf"))
        logits = torch.cat([positive[:, None], others], dim=1) / self.temperature
        contrast = -(F.log_softmax(logits, dim=1)[:, 0] * known[label].to(z)).mean()
        consistency = distance_to(z, ctx.shared["consistent"], known, label)
        return loss + self.contrast * contrast + self.consistency * consistency, out

    def finish(self, result: Result, shard: Shard, ctx: Context) -> tuple[Tree, Tree]:
        means, rows = class_means(ctx, result.weights, shard)
        return {"delta": result.delta, "prototypes": means, "rows": rows}, ctx.mine

    def reduce(self, uploads: Iterable[tuple[Tree, float]], aggregate: Aggregate) -> Tree:
        prototypes, rows = [], []

        def rest() -> Iterable[tuple[Tree, float]]:
            for upload, weight in uploads:
                method = dict(upload["method"])
                prototypes.append(method.pop("prototypes"))
                rows.append(method.pop("rows"))
                yield upload | {"method": method}, weight

        mean = aggregate(rest(), frozenset())
        return mean | {"method": mean["method"] | {"state": collaborate(torch.stack(prototypes), torch.stack(rows))}}

    def update(self, server: Server, mean: Tree, round: Round) -> Server:
        return super().update(server, mean, round)._replace(state=mean["state"])


def collaborate(prototypes: Tensor, rows: Tensor) -> Tree:
    """The server's state from the clients' prototypes [M, K, D] and rows [M, K]."""
    owned = rows.to(prototypes.device) > 0
    clients, classes, _ = prototypes.shape
    columns = prototypes.transpose(0, 1)  # [K, M, D]
    # torch's fast way, from 26 rows on, loses small distances between long vectors
    far = torch.cdist(columns, columns, compute_mode="donot_use_mm_for_euclid_dist")  # [K, M, M]
    candidates = owned.T[:, None, :] & ~torch.eye(clients, dtype=torch.bool, device=owned.device)
    far = far.masked_fill(~candidates, float("inf"))
    if clients:
        nearest = far.argmin(-1)  # [K, M]
        partner = columns.gather(1, nearest[..., None].expand_as(columns))
        alone = ~candidates.any(-1)[..., None]  # an only owner has no partner
        columns = torch.where(alone, columns, (columns + partner) / 2)
    relational = columns.transpose(0, 1) * owned[..., None]
    size = rows.sum(1)
    uneven = (0.5 * (rows / size.clamp(min=1)[:, None] - 1 / classes).square().sum(1)).sqrt()
    share = size / size.sum().clamp(min=1) - uneven / uneven.sum().clamp(min=1e-12)
    trust = torch.sigmoid(share).to(prototypes)[:, None] * owned  # [M, K]
    weights = trust / trust.sum(0).clamp(min=1e-12)
    return {"relational": relational, "owned": owned, "consistent": (weights[..., None] * relational).sum(0)}
