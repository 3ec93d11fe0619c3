"""Classifier re-training in the manner of CCVR (Luo et al., 2021, arXiv:2106.05001): only the last layer is biased.

FedAvg trains; whenever the model is judged or saved, its last layer is fitted anew to features of balanced
classes. CCVR draws such features from Gaussians that clients report; here they are those of the prior's images,
so that clients report nothing.
"""

from dataclasses import dataclass

import torch

from ..data.table import Table
from ..method import Method
from ..net import Net
from ..tree import Tree
from .checks import above_zero, at_least

ROWS = 256  # of a forward pass


@dataclass(frozen=True, kw_only=True)
class CCVR(Method):
    """`images_per_class` images of the prior give the features; the new layer is a multinomial logistic regression
    with an L2 penalty of strength 1 / `inverse_penalty`. Training goes on from the layer that FedAvg has."""

    images_per_class: int = 100
    inverse_penalty: float = 1.0

    def __post_init__(self) -> None:
        at_least(1, images_per_class=self.images_per_class)
        above_zero(inverse_penalty=self.inverse_penalty)

    @property
    def images(self) -> int:
        return self.images_per_class

    def deploy(self, net: Net, weights: Tree, images: Table | None, seed: int) -> Tree:
        from sklearn.linear_model import LogisticRegression

        assert images is not None
        with torch.no_grad():
            z = torch.cat([net(weights, x, train=False).features for x in images["image"].split(ROWS)])
        fit = LogisticRegression(C=self.inverse_penalty, max_iter=1000)
        fit.fit(z.double().cpu().numpy(), images["label"].cpu().numpy())
        head, bias = torch.from_numpy(fit.coef_), torch.from_numpy(fit.intercept_)
        if len(head) == 1:  # two classes have one row of coefficients
            head, bias = torch.cat([-head, head]) / 2, torch.cat([-bias, bias]) / 2
        old = weights["params"]
        new = {"head.weight": head.to(old["head.weight"]), "head.bias": bias.to(old["head.bias"])}
        return weights | {"params": old | new}
