"""Any classifier of timm by name (extra `fedprior[timm]`)."""

from torch import Tensor, nn

from ..errors import UserError, unknown


class Timm(nn.Module):
    """Features are what timm's own last layer would read."""

    def __init__(self, name: str, classes: int) -> None:
        super().__init__()
        try:
            import timm
        except ImportError as error:
            raise UserError(
                f"net=timm/{name} needs timm and a torchvision that fits torch ({error}); pip install 'fedprior[timm]'"
            ) from None
        if name not in timm.list_models():
            raise unknown("timm model", name, timm.list_models())
        self.model = timm.create_model(name, pretrained=False, num_classes=0)
        self.width = int(self.model.num_features)
        self.head = nn.Linear(self.width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.model.forward_head(self.model.forward_features(x), pre_logits=True)
        return z, self.head(z)
