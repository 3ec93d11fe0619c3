"""How well frozen features tell classes apart: a linear probe and nearest neighbours."""

import torch
import torch.nn.functional as F
from torch import Tensor

TEMPERATURE = 0.07  # of the neighbours' votes (Wu et al., arXiv:1805.01978, section 3.4)
STEPS = 1000  # of the logistic regression at most
CELLS = 2**25  # similarities held at a time: 128 MiB


def linear_head(z: Tensor, y: Tensor, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """-> (weight float64 [classes, d], bias [classes]) of multinomial logistic regression (L2 penalty, C = 1) on
    features [n, d] with labels int64 [n], on the CPU. A class without rows never wins.

    Features are standardised with their mean and standard deviation, which is folded into the result; one that is
    constant counts as zero. Raises ValueError for no rows and for features that are not finite.
    """
    from sklearn.linear_model import LogisticRegression

    _check_part("training", z, y)
    z, y = z.double().cpu(), y.cpu()
    mean, scale = z.mean(0), z.std(0, correction=0)
    varies = scale > 1e-12 * mean.abs()  # below is rounding
    weight, bias = torch.zeros(classes, z.shape[1], dtype=torch.float64), torch.full((classes,), float("-inf")).double()
    present = y.unique()
    bias[present] = 0.0
    if len(present) > 1:
        unit = ((z - mean) / scale).where(varies, 0.0)
        model = LogisticRegression(max_iter=STEPS, random_state=seed).fit(unit.numpy(), y.numpy())
        found, offset = torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_)
        if len(present) == 2:  # scikit-learn gives the second class's logit alone
            found, offset = torch.cat([-found / 2, found / 2]), torch.cat([-offset / 2, offset / 2])
        weight[present] = (found / scale).where(varies, 0.0)
        bias[present] = offset - weight[present] @ mean
    return weight, bias


def linear_probe(train_z: Tensor, train_y: Tensor, test_z: Tensor, test_y: Tensor, seed: int = 0) -> float:
    """Test accuracy in [0, 1] of `linear_head` on features [n, d], labels int64 [n].

    Raises ValueError for a part without rows, for parts that do not fit together and for features that are not finite.
    """
    _check(train_z, train_y, test_z, test_y)
    weight, bias = linear_head(train_z, train_y, int(torch.cat([train_y, test_y]).max()) + 1, seed)
    guess = (test_z.double().cpu() @ weight.T + bias).argmax(1)
    return float((guess == test_y.cpu()).double().mean())


def knn(train_z: Tensor, train_y: Tensor, test_z: Tensor, test_y: Tensor, k: int = 20) -> float:
    """Accuracy in [0, 1] of voting by the k training rows of greatest cosine (all, where there are fewer), each vote
    weighing exp(cos / 0.07), for features [n, d] and labels int64 [n].

    Of classes with equally many votes the lowest wins. Raises ValueError as `linear_probe` does, and for k < 1.
    """
    _check(train_z, train_y, test_z, test_y)
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    bank, asked = (F.normalize(z.float(), dim=1) for z in (train_z, test_z))
    classes = int(torch.cat([train_y, test_y]).max()) + 1
    hits = 0
    for z, y in zip(*(x.split(max(1, CELLS // len(bank))) for x in (asked, test_y)), strict=True):
        cosine, which = (z @ bank.T).topk(min(k, len(bank)))
        votes = torch.zeros(len(z), classes, device=z.device)
        votes.scatter_add_(1, train_y[which], (cosine / TEMPERATURE).exp())
        hits += int((votes.argmax(1) == y).sum())
    return hits / len(test_y)


def _check(train_z: Tensor, train_y: Tensor, test_z: Tensor, test_y: Tensor) -> None:
    _check_part("training", train_z, train_y)
    _check_part("test", test_z, test_y)
    if train_z.shape[1] != test_z.shape[1]:
        raise ValueError(f"training and test features differ in width: {train_z.shape[1]} and {test_z.shape[1]}")


def _check_part(part: str, z: Tensor, y: Tensor) -> None:
    if z.ndim != 2 or y.shape != z.shape[:1]:
        raise ValueError(f"the {part} part must be [n, d] with n labels, not {list(z.shape)} and {list(y.shape)}")
    if not z.numel():
        raise ValueError(f"the {part} part has no features: {list(z.shape)}")
    if not z.isfinite().all():
        raise ValueError(f"the {part} part has features that are not finite")
