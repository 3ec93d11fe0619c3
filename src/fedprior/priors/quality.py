"""How far made images are from real ones: pure functions of features and pixels.

Frechet distance as in FID (arXiv:1706.08500), kernel distance as in KID (arXiv:1801.01401), spread within classes,
repeats, and nearest neighbours, which say whether a model gives its training images back.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import seeds

SUBSETS, SUBSET = 100, 1000  # of the kernel distance, as usual
SIDE = 32  # pixels to which larger images are reduced before they are compared
CELLS = 2**24  # distances held at a time: 64 MiB
POOL = 4096  # images held as float rows at a time: 50 MB at 32 x 32


# distributions of features
def frechet(a: Tensor, b: Tensor) -> float:
    """The squared Frechet distance of two normal distributions with the moments of features [n, d] and [m, d].

    Raises ValueError for fewer than two rows.
    """
    if min(len(a), len(b)) < 2:
        raise ValueError(f"a covariance needs two rows or more, not {len(a)} and {len(b)}")
    return frechet_of(*moments(a), *moments(b))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Features [n, d] -> (mean [d], unbiased covariance [d, d]), float64."""
    x = x.double()
    mean = x.mean(0)
    centred = x - mean
    return mean, centred.T @ centred / (len(x) - 1)


def frechet_of(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> float:
    """|m - m'|^2 + tr C + tr C' - 2 tr (C^1/2 C' C^1/2)^1/2. The product is symmetric, so its eigenvalues are real
    and, but for rounding, not negative, even where C and C' are singular."""
    values, axes = torch.linalg.eigh(covariance)
    root = (axes * values.clamp(min=0).sqrt()) @ axes.T
    product = root @ other_covariance @ root
    shared = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
    distance = (mean - other_mean).square().sum() + covariance.trace() + other_covariance.trace() - 2 * shared
    return max(0.0, float(distance))


def mmd(a: Tensor, b: Tensor) -> float:
    """The unbiased squared maximum mean discrepancy of features [n, d] and [m, d] under (x.y / d + 1)^3; it may be
    below zero. Raises ValueError for fewer than two rows."""
    n, m = len(a), len(b)
    if min(n, m) < 2:
        raise ValueError(f"the discrepancy needs two rows or more, not {n} and {m}")
    a, b = a.double(), b.double()

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.T / x.shape[1] + 1) ** 3

    of_a, of_b = kernel(a, a), kernel(b, b)
    within = (of_a.sum() - of_a.trace()) / (n * (n - 1)) + (of_b.sum() - of_b.trace()) / (m * (m - 1))
    return float(within - 2 * kernel(a, b).mean())


def kid(a: Tensor, b: Tensor, seed: int, subsets: int = SUBSETS, size: int = SUBSET) -> float:
    """Mean of `mmd` over `subsets` drawn without replacement, of at most `size` rows each; of all rows at once where
    both have no more than that."""
    size = min(size, len(a), len(b))
    if size == len(a) == len(b):
        return mmd(a, b)
    found = []
    for i in range(subsets):
        rng = seeds.stream(seed, "kid subsets", i)
        mine, others = (torch.from_numpy(rng.permutation(len(x))[:size]) for x in (a, b))
        found.append(mmd(a[mine], b[others]))
    return sum(found) / len(found)


# variety
def spread(z: Tensor, label: Tensor, classes: int) -> Tensor:
    """Mean Euclidean distance of the pairs of different rows of each class, of features [n, d] with labels int64 [n]:
    float64 [classes], NaN for a class with fewer than two rows."""
    out = torch.full((classes,), float("nan"), dtype=torch.float64)
    for c in range(classes):
        own = z[label == c].double()
        if len(own) > 1:
            out[c] = torch.pdist(own).mean()
    return out


def repeats(images: Tensor, label: Tensor) -> Tensor:
    """Which images uint8 [n, 3, H, W] are byte-equal to an earlier one of the same class: bool [n]."""
    seen: set[tuple[int, bytes]] = set()
    out = []
    for image, c in zip(images, label.tolist(), strict=True):
        key = (c, image.numpy().tobytes())
        out.append(key in seen)
        seen.add(key)
    return torch.tensor(out, dtype=torch.bool)


def confusion(label: Tensor, found: Tensor, classes: int) -> Tensor:
    """How many rows of each class (down) were taken for each class (across): int64 [classes, classes]."""
    return (label * classes + found).bincount(minlength=classes**2).view(classes, classes)


# nearest neighbours
class Nearest(NamedTuple):
    """Of each row among others."""

    distance: Tensor  # float64 [n]; inf where there is no other
    which: Tensor  # int64 [n]


def pixels(images: Tensor) -> Tensor:
    """Images uint8 [n, 3, H, W] as float32 rows [n, 3 h w] in grey levels, reduced to at most 32 x 32; the Euclidean
    distance of two rows is their root-mean-square difference in grey levels."""
    x = reduced(images)
    return x.flatten(1) / x[0].numel() ** 0.5 if len(x) else x.flatten(1)


def reduced(images: Tensor) -> Tensor:
    """Images uint8 [n, 3, H, W] in grey levels, float32, at most 32 x 32."""
    x = images.float()
    small = [min(side, SIDE) for side in x.shape[-2:]]
    return x if list(x.shape[-2:]) == small else F.interpolate(x, small, mode="bilinear", antialias=True)


def nearest(a: Tensor, b: Tensor) -> Nearest:
    """The row of b [m, d] nearest (Euclidean) to each of a [n, d]. Raises ValueError where b has none."""
    return _nearest(a, b, own=False)


def nearest_image(images: Tensor, pool: Tensor, mirrored: bool = False) -> Nearest:
    """`nearest` of the `pixels` of images uint8 [n, 3, H, W] among those of a pool uint8 [m, 3, H, W], or, if
    `mirrored`, among those of their mirror images too. Raises ValueError for an empty pool."""
    if not len(pool):
        raise ValueError("there are no images among which one could be nearest")
    views = [pixels(images), pixels(images.flip(-1))] if mirrored else [pixels(images)]
    best = Nearest(torch.full((len(images),), float("inf"), dtype=torch.float64), torch.zeros(len(images)).long())
    for start in range(0, len(pool), POOL):
        part = pixels(pool[start : start + POOL])
        for view in views:
            distance, index = nearest(view, part)
            closer = distance < best.distance
            best = Nearest(distance.where(closer, best.distance), (index + start).where(closer, best.which))
    return best


def nearest_other(a: Tensor, label: Tensor) -> Nearest:
    """The row nearest to each of a [n, d] among the other rows with its label."""
    distance, index = torch.full((len(a),), float("inf"), dtype=torch.float64), torch.zeros(len(a), dtype=torch.int64)
    for c in label.unique():
        rows = torch.nonzero(label == c)[:, 0]
        if len(rows) > 1:
            found = _nearest(a[rows], a[rows], own=True)
            distance[rows], index[rows] = found.distance, rows[found.which]
    return Nearest(distance, index)


def _nearest(a: Tensor, b: Tensor, own: bool) -> Nearest:
    """`own`: a is b, and no row is its own neighbour."""
    if not len(b):
        raise ValueError("there are no rows among which one could be nearest")
    shift = b.mean(0)  # the smaller the numbers, the less the product below loses to rounding
    a, b = a - shift, b - shift
    half = b.square().sum(1) / 2
    index = []
    for start in range(0, len(a), step := max(1, CELLS // len(b))):
        far = half - a[start : start + step] @ b.T  # half the squared distance, less a number of the row
        if own:
            rows = torch.arange(len(far))
            far[rows, start + rows] = float("inf")
        index.append(far.argmin(1))
    found = torch.cat(index) if index else torch.zeros(0, dtype=torch.int64)
    return Nearest((a.double() - b[found].double()).square().sum(1).sqrt(), found)


def quantile(x: Tensor, share: float) -> float:
    """The linearly interpolated quantile of numbers [n], of any n."""
    import numpy as np

    return float(np.quantile(x.double().numpy(), share))


def below(x: Tensor, limit: float) -> float:
    """The share of numbers [n] below a limit."""
    return float((x < limit).double().mean())
