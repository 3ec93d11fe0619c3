"""FedAvgM (Hsu et al., 2019, arXiv:1909.06335): the server takes steps with momentum.

D = x - sum_k p_k y_k;  v+ = beta v + (1 - dampening) D;  x+ = x - lr v+
"""

from dataclasses import dataclass, field

from ..errors import UsageError
from ..method import Method
from ..optim import SGD, Optimizer


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Method):
    """FedAvg whose server takes SGD steps with momentum: `server.momentum` is beta, 0.9 as in the paper.

    `server.dampening=0.9` gives MOON's variant (arXiv:2103.16257), v+ = beta v + (1 - beta) D.
    """

    server: Optimizer = field(default=SGD(lr=1.0, momentum=0.9), metadata={"config": False})

    def check(self, local: Optimizer) -> None:
        if not isinstance(self.server, SGD):
            raise UsageError("method=fedavgm takes its server steps by server=sgd with server.momentum")
