import copy

import pytest
import torch
import torch.nn.functional as F

from fedprior import nets
from fedprior.errors import UsageError, UserError

COUNTS = [
    ("cct_2_3x2_32", 10, 283_723),
    ("cct_2_3x2_32", 100, 295_333),
    ("cct_2_3x2_32", 200, 308_233),
    ("resnet10", 10, 4_903_242),
    ("resnet10", 100, 4_949_412),
    ("resnet10", 200, 5_000_712),
    ("mobilenet_v2", 10, 1_981_706),
    ("mobilenet_v2", 100, 2_027_876),
    ("mobilenet_v2", 200, 2_079_176),
]


@pytest.mark.parametrize(("name", "classes", "parameters"), COUNTS)
def test_parameter_counts_are_the_published_ones(name, classes, parameters):
    assert sum(p.numel() for p in nets.build(name, classes).parameters()) == parameters


@pytest.mark.parametrize("name", nets.NETS)
def test_forward_gives_features_and_logits_and_every_parameter_a_finite_gradient(name):
    net = nets.build(name, 7)
    features, logits = net(torch.randn(5, 3, 32, 32))
    assert features.shape == (5, net.width)
    assert logits.shape == (5, 7)
    F.cross_entropy(logits, torch.arange(5)).backward()
    for parameter_name, p in net.named_parameters():
        assert p.grad is not None, parameter_name
        assert p.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", nets.NETS)
def test_initial_weights_are_a_function_of_the_seed_alone(name):
    state = torch.get_rng_state()
    first = nets.build(name, 10, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    again, other = nets.build(name, 10, seed=3).state_dict(), nets.build(name, 10, seed=4).state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert any(not torch.equal(first[k], other[k]) for k in first)


def test_cct_equals_the_specification_written_out():
    """papers.md 2.6 step by step: ReLU then pool, one head at a time, sequence pooling as an explicit sum."""
    net = nets.build("cct_2_3x2_32", 10, seed=1).eval()
    for p in net.parameters():  # zero biases and unit norms would hide mistakes
        p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    w = net.state_dict()

    t = F.max_pool2d(F.relu(F.conv2d(x, w["conv1.weight"], padding=1)), 3, 2, 1)
    t = F.max_pool2d(F.relu(F.conv2d(t, w["conv2.weight"], padding=1)), 3, 2, 1)
    s = t.reshape(2, 128, 64).permute(0, 2, 1) + w["positions"]
    for i in (0, 1):
        block = {k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        h = F.layer_norm(s, (128,), block["norm1.weight"], block["norm1.bias"])
        qkv = h @ block["attention.qkv.weight"].T
        q, k, v = qkv[..., :128], qkv[..., 128:256], qkv[..., 256:]
        heads = []
        for j in (0, 1):
            part = slice(64 * j, 64 * (j + 1))
            a = torch.softmax(torch.einsum("bnd,bmd->bnm", q[..., part], k[..., part]) / 8, dim=-1)
            heads.append(torch.einsum("bnm,bmd->bnd", a, v[..., part]))
        s = s + torch.cat(heads, -1) @ block["attention.proj.weight"].T + block["attention.proj.bias"]
        s = F.layer_norm(s, (128,), block["norm2.weight"], block["norm2.bias"])
        h = s @ block["linear1.weight"].T + block["linear1.bias"]
        h = 0.5 * h * (1 + torch.erf(h / 2**0.5))
        s = s + h @ block["linear2.weight"].T + block["linear2.bias"]
    s = F.layer_norm(s, (128,), w["norm.weight"], w["norm.bias"])
    a = torch.softmax(s @ w["pool.weight"].T + w["pool.bias"], dim=1)  # [B, N, 1]
    z = sum(a[:, n] * s[:, n] for n in range(64))
    features, logits = net(x)
    torch.testing.assert_close(features, z, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, z @ w["head.weight"].T + w["head.bias"], rtol=1e-4, atol=1e-5)


def test_stochastic_depth_leaves_branches_out_in_training_only_and_keeps_the_mean():
    drop = copy.deepcopy(nets.build("cct_2_3x2_32", 10).layers[1].drop_path)
    x = torch.ones(20_000, 1, 1)
    assert torch.equal(drop.eval()(x), x)
    torch.manual_seed(0)
    y = drop.train()(x)
    assert y.unique().tolist() == pytest.approx([0, 1 / 0.9])
    assert y.mean().item() == pytest.approx(1, abs=0.01)
    assert nets.build("cct_2_3x2_32", 10).layers[0].drop_path.rate == 0


def test_resnet10_equals_its_definition_at_one_stage():
    net = nets.build("resnet10", 10).eval()
    x = torch.randn(2, 64, 8, 8)
    block = net.layers[1]
    out = block.bn2(
        F.conv2d(
            F.relu(block.bn1(F.conv2d(x, block.conv1.weight, stride=2, padding=1))),
            block.conv2.weight,
            padding=1,
        )
    )
    short = block.shortcut[1](F.conv2d(x, block.shortcut[0].weight, stride=2))
    torch.testing.assert_close(block(x), F.relu(out + short))


@pytest.mark.parametrize(("name", "size"), [("cct_2", 32), ("resnet", 32), ("cn", 16)])
def test_an_unknown_name_gives_the_nearest(name, size):
    with pytest.raises(UsageError, match=r"did you mean|choose from"):
        nets.build(name, 10, size=size)


@pytest.mark.parametrize(("name", "size"), [("cct_2_3x2_32", 28), ("mobilenet_v2", 16), ("cnn", 4)])
def test_a_size_that_does_not_fit_names_the_remedy(name, size):
    with pytest.raises(UserError, match=r"data\.size="):
        nets.build(name, 10, size=size)
