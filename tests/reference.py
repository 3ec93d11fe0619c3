"""A second implementation of the federated methods, in numpy and float64, written from the papers' formulas.

It shares no code with the package: forward, backward, optimisers, client objectives and server rules are written
out by hand. Only which rows a step sees (`plan`) and who takes part (`cohort`) are handed in, since they are no
part of a method's mathematics.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Params = dict[str, np.ndarray]
W1, B1, W2, B2 = "body.0.weight", "body.0.bias", "head.weight", "head.bias"


# Params are vectors: the few operations that the formulas need.
def combine(*terms: tuple[float, Params]) -> Params:
    """sum of s * p"""
    return {k: sum(s * p[k] for s, p in terms) for k in terms[0][1]}


def zeros(p: Params) -> Params:
    return {k: np.zeros_like(x) for k, x in p.items()}


# The net: x -> z = tanh(x W1' + b1) -> z W2' + b2.
def pixels(image: np.ndarray) -> np.ndarray:
    return ((image.astype(np.float64) / 255 - 0.5) / 0.5).reshape(len(image), -1)


def features(p: Params, image: np.ndarray) -> np.ndarray:
    return np.tanh(pixels(image) @ p[W1].T + p[B1])


def softmax(s: np.ndarray) -> np.ndarray:
    e = np.exp(s - s.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def error(logits: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Gradient of the batch's mean cross-entropy in the logits."""
    d = softmax(logits)
    d[np.arange(len(label)), label] -= 1
    return d / len(label)


def through_body(image: np.ndarray, z: np.ndarray, dz: np.ndarray) -> Params:
    du = dz * (1 - z**2)
    return {W1: du.T @ pixels(image), B1: du.sum(0)}


def cross_entropy(p: Params, image: np.ndarray, label: np.ndarray, extra=None) -> Params:
    """Gradient of cross-entropy plus a term whose gradient in z is extra(z, image, label)."""
    z = features(p, image)
    d = error(z @ p[W2].T + p[B2], label)
    dz = d @ p[W2]
    if extra is not None:
        dz = dz + extra(z, image, label)
    return through_body(image, z, dz) | {W2: d.T @ z, B2: d.sum(0)}


def unit(a: np.ndarray) -> np.ndarray:
    return a / np.linalg.norm(a, axis=-1, keepdims=True)


def cosine_gradient(z: np.ndarray, t: np.ndarray) -> np.ndarray:
    """d cos(z, t) / dz, row by row."""
    zn, tn = unit(z), unit(t)
    return (tn - (zn * tn).sum(-1, keepdims=True) * zn) / np.linalg.norm(z, axis=-1, keepdims=True)


def class_means(z: np.ndarray, label: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """-> (means [K, D], rows [K])"""
    mean, rows = np.zeros((classes, z.shape[1])), np.zeros(classes)
    for c in range(classes):
        rows[c] = (label == c).sum()
        if rows[c]:
            mean[c] = z[label == c].mean(0)
    return mean, rows


# Local optimisers. Each object is one run's state.
@dataclass
class SGD:
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    v: Params | None = None

    def step(self, p: Params, g: Params, factor: float = 1.0) -> Params:
        g = combine((1.0, g), (self.weight_decay, p))
        self.v = combine((self.momentum, self.v or zeros(p)), (1.0, g))
        return combine((1.0, p), (-self.lr * factor, self.v))


@dataclass
class AdamW:
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    m: Params | None = None
    v: Params | None = None
    t: int = 0

    def step(self, p: Params, g: Params, factor: float = 1.0) -> Params:
        rate, self.t = self.lr * factor, self.t + 1
        self.m = combine((self.beta1, self.m or zeros(p)), (1 - self.beta1, g))
        self.v = combine((self.beta2, self.v or zeros(p)), (1 - self.beta2, {k: x**2 for k, x in g.items()}))
        out = {}
        for k in p:
            m = self.m[k] / (1 - self.beta1**self.t)
            v = self.v[k] / (1 - self.beta2**self.t)
            out[k] = p[k] * (1 - rate * self.weight_decay) - rate * m / (np.sqrt(v) + self.eps)
        return out


@dataclass
class World:
    """Everybody's data and how clients train, the same for every method."""

    images: list[np.ndarray]  # uint8 [n_k, 3, 2, 2]
    labels: list[np.ndarray]
    classes: int
    start: Params
    plan: Callable[[int, int, int], np.ndarray]  # (rows, round, client) -> row numbers [steps, batch]
    cohort: Callable[[int], list[int]]
    optimizer: SGD | AdamW  # never stepped itself, only copied
    factor: Callable[[int, int, int], float] = lambda round, step, steps: 1.0
    clip: float | None = None

    @property
    def n(self) -> int:
        return len(self.images)

    def rows(self, k: int) -> int:
        return len(self.labels[k])

    def shares(self, cohort: list[int]) -> dict[int, float]:
        """p_k"""
        return {k: self.rows(k) / sum(self.rows(j) for j in cohort) for k in cohort}

    def train(self, k, r, start, gradient=cross_entropy, hook=None, after=None, optimizer=None):
        """-> (y_k, the rates of its steps); `hook(g, p)` changes a gradient, `after(p, rate)` the stepped params."""
        opt = copy.deepcopy(self.optimizer) if optimizer is None else optimizer
        p, rates = start, []
        plan = self.plan(self.rows(k), r, k)
        for step, which in enumerate(plan):
            g = gradient(p, self.images[k][which], self.labels[k][which])
            if hook:
                g = hook(g, p)
            if self.clip is not None:
                norm = np.sqrt(sum((x**2).sum() for x in g.values()))
                g = combine((min(1.0, self.clip / (norm + 1e-6)), g))
            factor = self.factor(r, step, len(plan))
            rates.append(opt.lr * factor)
            p = opt.step(p, g, factor)
            if after:
                p = after(p, rates[-1])
        return p, rates


class FedAvg:
    """x+ = sum p_k y_k. The other methods begin here and replace what differs."""

    def __init__(self, world: World) -> None:
        self.w, self.x = world, world.start

    def local(self, k: int, r: int) -> Params:
        return self.w.train(k, r, self.x)[0]

    def mean(self, y: dict[int, Params]) -> Params:
        p = self.w.shares(list(y))
        return combine(*((p[k], y[k]) for k in y))

    def server(self, y: dict[int, Params]) -> None:
        self.x = self.mean(y)

    def round(self, r: int) -> None:
        self.server({k: self.local(k, r) for k in self.w.cohort(r)})


class FedProx(FedAvg):
    """f_k(w) + mu/2 |w - x|^2"""

    def __init__(self, world: World, mu: float) -> None:
        super().__init__(world)
        self.mu = mu

    def local(self, k: int, r: int) -> Params:
        x = self.x
        return self.w.train(k, r, x, hook=lambda g, p: combine((1, g), (self.mu, p), (-self.mu, x)))[0]


class FedAvgM(FedAvg):
    """v+ = beta v + (1 - dampening) (x - sum p_k y_k); x+ = x - eta v+"""

    def __init__(self, world: World, eta: float, beta: float, dampening: float = 0.0) -> None:
        super().__init__(world)
        self.eta, self.beta, self.dampening, self.v = eta, beta, dampening, zeros(world.start)

    def server(self, y: dict[int, Params]) -> None:
        delta = combine((1, self.x), (-1, self.mean(y)))
        self.v = combine((self.beta, self.v), (1 - self.dampening, delta))
        self.x = combine((1, self.x), (-self.eta, self.v))


class FedOpt(FedAvg):
    """m+ = b1 m + (1 - b1) D; x+ = x + eta m+ / (sqrt(v+) + tau), from v = tau^2"""

    def __init__(self, world: World, rule: str, eta: float, b1: float, b2: float, tau: float, correct: bool) -> None:
        super().__init__(world)
        self.rule, self.eta, self.b1, self.b2, self.tau, self.correct = rule, eta, b1, b2, tau, correct
        self.m, self.v, self.t = zeros(world.start), {k: np.full_like(p, tau**2) for k, p in world.start.items()}, 0

    def server(self, y: dict[int, Params]) -> None:
        mean, self.t = self.mean(y), self.t + 1
        step = np.sqrt(1 - self.b2**self.t) / (1 - self.b1**self.t) if self.correct else 1.0
        new = {}
        for k, x in self.x.items():
            d, v = mean[k] - x, self.v[k]
            self.m[k] = self.b1 * self.m[k] + (1 - self.b1) * d
            if self.rule == "Adagrad":
                v = v + d**2
            elif self.rule == "Yogi":
                v = v - (1 - self.b2) * d**2 * np.sign(v - d**2)
            else:
                v = self.b2 * v + (1 - self.b2) * d**2
            self.v[k] = v
            new[k] = x + self.eta * step * self.m[k] / (np.sqrt(v) + self.tau)
        self.x = new


class FedNova(FedAvg):
    """d_k = (x - y_k) / a_k; x+ = x - tau_eff sum p_k d_k, in the units of a displacement: a_k includes the rates.

    Plain SGD: a_k = sum of rates. Momentum at one rate: [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho) times
    that. A proximal term: a+ = (1 - rate mu) a + rate. AdamW: as plain SGD. tau_eff = sum p_k a_k, but with a
    proximal term sum p_k (sum of rates).
    """

    def __init__(self, world: World, mu: float = 0.0, gmf: float = 0.0) -> None:
        super().__init__(world)
        self.mu, self.gmf, self.v = mu, gmf, zeros(world.start)

    def round(self, r: int) -> None:
        x, mu = self.x, self.mu
        rho = getattr(self.w.optimizer, "momentum", 0.0)
        cohort = self.w.cohort(r)
        p = self.w.shares(cohort)
        direction, effective = zeros(x), 0.0
        for k in cohort:
            y, rates = self.w.train(k, r, x, hook=lambda g, q: combine((1, g), (mu, q), (-mu, x)))
            if mu:
                assert not rho
                a = 0.0
                for rate in rates:
                    a = (1 - rate * mu) * a + rate
            elif rho:
                tau = len(rates)
                assert set(rates) == {rates[0]}
                a = rates[0] * (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
            else:
                a = sum(rates)
            direction = combine((1, direction), (p[k] / a, x), (-p[k] / a, y))
            effective += p[k] * (sum(rates) if mu else a)
        self.v = combine((self.gmf, self.v), (effective, direction))
        self.x = combine((1, x), (-1, self.v))


class Scaffold(FedAvg):
    def __init__(self, world: World, mode: str = "post", option: str = "II", sampled: bool = False) -> None:
        super().__init__(world)
        self.mode, self.option, self.sampled = mode, option, sampled
        self.c = zeros(world.start)
        self.ck = {k: zeros(world.start) for k in range(world.n)}

    def round(self, r: int) -> None:
        w, x, c = self.w, self.x, self.c
        cohort = w.cohort(r)
        y, new = {}, {}
        for k in cohort:
            ck, raw = self.ck[k], []

            def before_step(g, p, ck=ck, raw=raw):
                raw.append(g)
                return g if self.mode == "post" else combine((1, g), (1, c), (-1, ck))

            def after_step(p, rate, ck=ck):
                return combine((1, p), (-rate, c), (rate, ck)) if self.mode == "post" else p

            y[k], rates = w.train(k, r, x, hook=before_step, after=after_step)
            if self.option == "I":
                new[k] = cross_entropy(x, w.images[k], w.labels[k])
            elif self.mode == "pre":
                new[k] = combine(*((1 / len(raw), g) for g in raw))
            else:
                new[k] = combine((1, ck), (-1, c), (1 / sum(rates), x), (-1 / sum(rates), y[k]))
        self.server(y)
        n = len(cohort) if self.sampled else w.n
        for k in cohort:
            self.c = combine((1, self.c), (1 / n, new[k]), (-1 / n, self.ck[k]))
            self.ck[k] = new[k]


class FedDyn(FedAvg):
    """f_k(w) - <g_k, w> + alpha/2 |w - x|^2, then g_k -= alpha (y_k - x); h -= alpha/N sum (y_k - x);
    x+ = mean y_k - h / alpha"""

    def __init__(self, world: World, alpha: float) -> None:
        super().__init__(world)
        self.alpha, self.h = alpha, zeros(world.start)
        self.g = {k: zeros(world.start) for k in range(world.n)}

    def round(self, r: int) -> None:
        x, alpha = self.x, self.alpha
        cohort = self.w.cohort(r)
        mean = zeros(x)
        for k in cohort:
            gk = self.g[k]
            y, _ = self.w.train(k, r, x, hook=lambda g, p, gk=gk: combine((1, g), (-1, gk), (alpha, p), (-alpha, x)))
            self.g[k] = combine((1, gk), (-alpha, y), (alpha, x))
            self.h = combine((1, self.h), (-alpha / self.w.n, y), (alpha / self.w.n, x))
            mean = combine((1, mean), (1 / len(cohort), y))
        self.x = combine((1, mean), (-1 / alpha, self.h))


class Moon(FedAvg):
    """CE + mu l_con on the raw features, l_con = -log(e^{cos(z, z_glob)/T} / (e^{cos(z, z_glob)/T} + sum over the
    client's previous models of e^{cos(z, z_prev)/T})); at first the initial model is the only previous one."""

    def __init__(self, world: World, mu: float, temperature: float, queue: int) -> None:
        super().__init__(world)
        self.mu, self.temperature, self.queue = mu, temperature, queue
        self.previous = {k: [world.start] for k in range(world.n)}  # newest first

    def local(self, k: int, r: int) -> Params:
        teachers = [self.x, *self.previous[k]]

        def contrast(z, image, label):
            t = [features(p, image) for p in teachers]
            cos = np.stack([(unit(z) * unit(a)).sum(1) for a in t], 1)
            d = softmax(cos / self.temperature)
            d[:, 0] -= 1
            d *= self.mu / (self.temperature * len(z))
            return sum(d[:, [j]] * cosine_gradient(z, a) for j, a in enumerate(t))

        y, _ = self.w.train(k, r, self.x, gradient=lambda p, i, c: cross_entropy(p, i, c, contrast))
        self.previous[k] = [y, *self.previous[k]][: self.queue]
        return y


class FedProto(FedAvg):
    """CE + strength * MSE(z, global prototype of the label), the mean over batch and dimensions in which rows of
    unknown classes count zero. Global: mean of the owners' class means, each once or by its rows of the class."""

    def __init__(self, world: World, strength: float, average: bool, by_rows: bool) -> None:
        super().__init__(world)
        self.strength, self.average, self.by_rows = strength, average, by_rows
        self.own = dict.fromkeys(range(world.n), world.start)
        self.prototype: dict[int, np.ndarray] = {}

    def round(self, r: int) -> None:
        def pull(z, image, label):
            dz = np.zeros_like(z)
            for i, c in enumerate(label):
                if c in self.prototype:
                    dz[i] = 2 * self.strength * (z[i] - self.prototype[c]) / z.size
            return dz

        y, found = {}, []
        for k in self.w.cohort(r):
            start = self.x if self.average else self.own[k]
            y[k], _ = self.w.train(k, r, start, gradient=lambda p, i, c: cross_entropy(p, i, c, pull))
            found.append(class_means(features(y[k], self.w.images[k]), self.w.labels[k], self.w.classes))
        self.own |= y
        if self.average:
            self.server(y)
        for c in range(self.w.classes):
            owners = [(mean[c], rows[c] if self.by_rows else 1.0) for mean, rows in found if rows[c]]
            if owners:
                self.prototype[c] = sum(m * n for m, n in owners) / sum(n for _, n in owners)


SCALE = "head.scale"


class FedNH(FedAvg):
    """logits = s cos(z, W_y) with unit W that no client trains; A = normalised mean of the clients' unit class means
    by rows; W+ = normalise(rho W + (1 - rho) A), W_c unchanged where nobody has the class. The rest: plain mean."""

    def __init__(self, world: World, rho: float, fixed_scale: float | None = None) -> None:
        super().__init__(world)
        self.rho, self.fixed_scale = rho, fixed_scale

    def round(self, r: int) -> None:
        w, learn = self.x[W2], self.fixed_scale is None

        def gradient(p, image, label):
            z, scale = features(p, image), p[SCALE] if learn else self.fixed_scale
            cos = unit(z) @ w.T
            d = error(scale * cos, label)
            du = scale * d @ w
            u = unit(z)
            dz = (du - u * (u * du).sum(1, keepdims=True)) / np.linalg.norm(z, axis=1, keepdims=True)
            g = through_body(image, z, dz)
            return g | {SCALE: np.full_like(p[SCALE], (d * cos).sum())} if learn else g

        cohort = self.w.cohort(r)
        trained = {k: p for k, p in self.x.items() if k != W2}
        mean, total = zeros(trained), np.zeros_like(w)
        for k in cohort:
            y, _ = self.w.train(k, r, trained, gradient=gradient)
            mean = combine((1, mean), (1 / len(cohort), y))
            z = unit(features(y, self.w.images[k]))
            for c in range(self.w.classes):
                mine = z[self.w.labels[k] == c]
                if len(mine):
                    total[c] += len(mine) * unit(mine.mean(0))
        new = w.copy()
        for c in range(self.w.classes):
            if total[c].any():
                new[c] = unit(self.rho * w[c] + (1 - self.rho) * unit(total[c]))
        self.x = mean | {W2: new}


def shares_of_classes(world: World, k: int) -> np.ndarray:
    return np.bincount(world.labels[k], minlength=world.classes) / world.rows(k)


class FedDisco(FedAvg):
    """Weights ~ relu(p_k - a d_k + b), d_k how far the client's classes are from even; p_k where all would be zero."""

    def __init__(self, world: World, a: float, b: float, kl: bool) -> None:
        super().__init__(world)
        self.a, self.b, self.kl = a, b, kl
        self.zeros = 0  # clients of the last round whose relu is zero

    def mean(self, y: dict[int, Params]) -> Params:
        p, even, d = self.w.shares(list(y)), 1 / self.w.classes, {}
        for k in y:
            s = shares_of_classes(self.w, k)
            d[k] = (s[s > 0] * np.log(s[s > 0] / even)).sum() if self.kl else np.sqrt(((s - even) ** 2).sum())
        if self.kl:
            d = {k: x / sum(d.values()) for k, x in d.items()}
        e = {k: max(0.0, p[k] - self.a * d[k] + self.b) for k in y}
        self.zeros = sum(x == 0 for x in e.values())
        e = e if any(e.values()) else p
        return combine(*((e[k] / sum(e.values()), y[k]) for k in y))


class FedSC(FedAvg):
    """CE + InfoNCE against relational prototypes + MSE to consistent ones, from the second round on."""

    def __init__(self, world: World, contrast: float, consistency: float, temperature: float) -> None:
        super().__init__(world)
        self.contrast, self.consistency, self.temperature = contrast, consistency, temperature
        self.relational: dict[tuple[int, int], np.ndarray] = {}  # (client, class)
        self.consistent: dict[int, np.ndarray] = {}

    def extra(self, z, image, label):
        dz = np.zeros_like(z)
        for i, c in enumerate(label):
            mine = [r for (_, other), r in self.relational.items() if other == c]
            if not mine:
                continue
            others = [r for (_, other), r in self.relational.items() if other != c]
            against = np.stack([np.mean(mine, 0), *others])
            zs = np.repeat(z[[i]], len(against), 0)
            d = softmax((unit(zs) * unit(against)).sum(1)[None] / self.temperature)[0]
            d[0] -= 1
            dz[i] += self.contrast * d @ cosine_gradient(zs, against) / (self.temperature * len(z))
            dz[i] += self.consistency * 2 * (z[i] - self.consistent[c]) / z.size
        return dz

    def round(self, r: int) -> None:
        w, cohort, y, p = self.w, self.w.cohort(r), {}, {}
        for k in cohort:
            y[k], _ = w.train(k, r, self.x, gradient=lambda q, i, c: cross_entropy(q, i, c, self.extra))
            mean, rows = class_means(features(y[k], w.images[k]), w.labels[k], w.classes)
            p |= {(k, c): mean[c] for c in range(w.classes) if rows[c]}
        self.server(y)
        d = {k: np.sqrt(0.5 * ((shares_of_classes(w, k) - 1 / w.classes) ** 2).sum()) for k in cohort}
        share = w.shares(cohort)
        e = {k: 1 / (1 + np.exp(-(share[k] - d[k] / sum(d.values())))) for k in cohort}
        self.relational, self.consistent = {}, {}
        for (k, c), mine in p.items():
            others = [q for (j, b), q in p.items() if b == c and j != k]
            nearest = min(others, key=lambda q: np.linalg.norm(q - mine)) if others else mine
            self.relational[k, c] = (mine + nearest) / 2
        for c in range(w.classes):
            owners = [k for k in cohort if (k, c) in p]
            if owners:
                total = sum(e[k] for k in owners)
                self.consistent[c] = sum(e[k] * self.relational[k, c] for k in owners) / total


class Local(FedAvg):
    """Nobody sends anything. An optimiser's state ends with the round."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.own = dict.fromkeys(range(world.n), world.start)

    def round(self, r: int) -> None:
        self.own |= {k: self.w.train(k, r, self.own[k])[0] for k in self.w.cohort(r)}


class Persistent(FedAvg):
    """FedAvg whose clients keep their optimiser's state between rounds; with one client: central training."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.opt = {k: copy.deepcopy(world.optimizer) for k in range(world.n)}

    def local(self, k: int, r: int) -> Params:
        return self.w.train(k, r, self.x, optimizer=self.opt[k])[0]
