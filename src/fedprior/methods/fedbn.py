"""FedBN (Li et al., 2021, arXiv:2102.07623): everything is averaged except batch norm, which stays with each client."""

from dataclasses import dataclass

from ..method import Method
from ..net import Net


@dataclass(frozen=True, kw_only=True)
class FedBN(Method):
    """Scale, shift and statistics of batch-norm layers never leave a client; accuracy is the mean over the clients'
    own models. With a net without batch norm it is FedAvg."""

    def keeps(self, net: Net) -> frozenset[str]:
        return net.batch_norm_names

    def remark(self, net: Net) -> str:
        return "" if net.batch_norm_names else "there is no batch norm in it, so fedbn does what fedavg does"
