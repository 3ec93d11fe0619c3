import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprior import nets
from fedprior.data import digits
from fedprior.data.augment import STATISTICS, normalise


class Reader:
    """A net's convolutions with batch norm, in the order they were defined, evaluated by formula."""

    def __init__(self, net: nn.Module) -> None:
        for m in net.modules():
            if isinstance(m, nn.BatchNorm2d):  # fresh statistics of 0 and 1 would hide mistakes
                g = torch.Generator().manual_seed(m.num_features)
                m.running_mean.normal_(0, 0.1, generator=g)
                m.running_var.uniform_(0.5, 1.5, generator=g)
                m.weight.data.uniform_(1, 3, generator=g)  # so that some pass the 6 of ReLU6
                m.bias.data.normal_(0, 0.1, generator=g)
        self.convs = iter([m for m in net.modules() if isinstance(m, nn.Conv2d)])
        self.norms = iter([m for m in net.modules() if isinstance(m, nn.BatchNorm2d)])

    def __call__(self, x: Tensor, stride: int = 1, groups: int = 1) -> Tensor:
        w, n = next(self.convs).weight, next(self.norms)
        x = F.conv2d(x, w, stride=stride, padding=w.shape[-1] // 2, groups=groups)
        mean, var, scale, shift = (t.view(1, -1, 1, 1) for t in (n.running_mean, n.running_var, n.weight, n.bias))
        return (x - mean) / (var + 1e-5).sqrt() * scale + shift


def images(n: int) -> Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_resnet10_equals_its_definition_from_image_to_logits():
    net, x = nets.build("resnet10", 10, seed=1).eval(), images(2)
    read = Reader(net)
    s = F.relu(read(x))
    for i, stride in enumerate((1, 2, 2, 2)):
        out = read(F.relu(read(s, stride)))
        s = F.relu(out + (s if i == 0 else read(s, stride)))
    z = s.mean((2, 3))
    features, logits = net(x)
    torch.testing.assert_close(features, z, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, z @ net.head.weight.T + net.head.bias, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_mobilenet_v2_equals_table_2_of_its_paper():
    net, x = nets.build("mobilenet_v2", 10, seed=1).eval(), images(2) * 3
    read = Reader(net)
    s = read(x, 2).clamp(0, 6)
    table = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, channels, repeats, first in table:
        for i in range(repeats):
            stride = first if i == 0 else 1
            t = read(s).clamp(0, 6) if expansion > 1 else s
            t = read(read(t, stride, groups=t.shape[1]).clamp(0, 6))
            s = s + t if stride == 1 and s.shape[1] == channels else t
    z = read(s).clamp(0, 6).mean((2, 3))
    torch.testing.assert_close(net(x)[0], z, rtol=1e-4, atol=1e-4)
    assert z.std() > 0.01


@pytest.mark.parametrize(
    ("name", "key", "std"),
    [
        ("cct_2_3x2_32", "positions", 0.2),
        ("cct_2_3x2_32", "layers.0.linear1.weight", 0.02),
        ("cct_2_3x2_32", "layers.1.attention.qkv.weight", 0.02),
        ("cct_2_3x2_32", "conv1.weight", (2 / 27) ** 0.5),
        ("cct_2_3x2_32", "conv2.weight", (2 / 576) ** 0.5),
        ("mobilenet_v2", "head.weight", 0.01),
        ("mobilenet_v2", "body.18.0.weight", (2 / 512) ** 0.5),
    ],
)
def test_initial_weights_have_the_published_spread(name, key, std):
    w = nets.build(name, 10, seed=2).state_dict()[key]
    assert w.std().item() == pytest.approx(std, rel=0.08)
    assert abs(w.mean().item()) < 4 * std / w.numel() ** 0.5


def test_attention_drops_a_tenth_of_its_weights_in_training_only():
    attention = nets.build("cct_2_3x2_32", 10).layers[0].attention
    seen: list[Tensor] = []
    attention.dropout.register_forward_hook(lambda m, given, out: seen.append(out == 0))
    x = torch.randn(64, 64, 128, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    attention.train()(x)
    attention.eval()(x)
    assert seen[0].float().mean().item() == pytest.approx(0.1, abs=0.005)
    assert not seen[1].any()


@pytest.mark.parametrize(("name", "norms"), [("cnn", 0), ("cct_2_3x2_32", 0), ("resnet10", 12), ("mobilenet_v2", 52)])
def test_batch_norm_statistics_are_buffers_and_only_batch_norm_has_any(name, norms):
    assert len(list(nets.build(name, 10).buffers())) == 3 * norms


def test_cnn_learns_the_embedded_digits():
    train, test = digits.train(), digits.test()
    net, half = nets.build("cnn", 10, size=16), (0.5, 0.5, 0.5)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    rng = torch.Generator().manual_seed(0)
    for _ in range(400):
        which = torch.randint(len(train["label"]), (32,), generator=rng)
        loss = F.cross_entropy(net(normalise(train["image"][which], half, half))[1], train["label"][which])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = net(normalise(test["image"], half, half))[1].argmax(1) == test["label"]
    assert right.float().mean() > 0.95


def test_statistics_are_those_of_the_papers_settings():
    assert STATISTICS["cifar10"] == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    assert STATISTICS["cifar100"] == ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))
