import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprior import tree

leaves = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=4)


@given(
    st.lists(st.tuples(leaves, st.floats(0.1, 100)), min_size=1, max_size=6).filter(
        lambda x: len({len(a) for a, _ in x}) == 1
    )
)
def test_mean_is_numpys_weighted_average_in_float64(items):
    trees = [({"a": {"b": torch.tensor(values, dtype=torch.float32)}}, w) for values, w in items]
    want = np.average(
        np.array([np.float32(v) for v, _ in items], dtype=np.float64), axis=0, weights=[w for _, w in items]
    )
    got = tree.mean(iter(trees))["a"]["b"]
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), want.astype(np.float32), rtol=1e-6, atol=1e-6)


def test_mean_does_not_lose_small_updates_that_float32_sums_would():
    items = [
        ({"x": torch.tensor([1e8])}, 1.0),
        ({"x": torch.tensor([1.0])}, 1.0),
        ({"x": torch.tensor([-1e8])}, 1.0),
    ]
    assert tree.mean(items)["x"].item() == pytest.approx(1 / 3, rel=1e-6)


def test_mean_leaves_its_items_alone():
    a, b = torch.ones(3), torch.full((3,), 3.0)
    tree.mean([({"x": a}, 1.0), ({"x": b}, 2.0)])
    assert a.tolist() == [1, 1, 1]
    assert b.tolist() == [3, 3, 3]


def test_mean_takes_integer_leaves_from_the_heaviest_item_and_keeps_their_type():
    items = [({"n": torch.tensor(3)}, 1.0), ({"n": torch.tensor(7)}, 5.0), ({"n": torch.tensor(9)}, 5.0)]
    got = tree.mean(items)["n"]
    assert got.dtype == torch.int64
    assert got.item() == 7


def test_mean_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        tree.mean([])


def test_flatten_round_trip_keeps_empty_subtrees():
    a = {"x": {"w.b": torch.arange(3), "empty": {}}, "y": torch.zeros(2)}
    back = tree.unflatten(tree.flatten(a))
    assert back["x"]["empty"] == {}
    assert torch.equal(back["x"]["w.b"], a["x"]["w.b"])
    assert list(tree.flatten(a)) == ["x/w.b", "x/empty/", "y"]


def test_bytes_and_norm():
    a = {"x": torch.full((3,), 2.0), "y": {"z": torch.tensor([1, 2], dtype=torch.int64)}}
    assert tree.num_bytes(a) == 3 * 4 + 2 * 8
    assert tree.norm({"x": torch.tensor([3.0]), "y": {"z": torch.tensor([4.0])}}) == 5
