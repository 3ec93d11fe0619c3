from itertools import islice

import pytest
import torch
import toy

from fedprior import store, tree
from fedprior.engines.serial import Serial
from fedprior.errors import UserError
from fedprior.federate import begin, federate
from fedprior.memory import ClientMemory
from fedprior.methods import METHODS, Moon, Scaffold
from fedprior.traffic import MB, Traffic


def memory_of(seed: int = 0) -> dict:
    """One of each kind of leaf that a method may remember, in an order that is not the alphabet's."""
    g = torch.Generator().manual_seed(seed)
    kernel = torch.randn(8, 3, 3, 3, generator=g).contiguous(memory_format=torch.channels_last)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    return {
        "method": {
            "z": torch.randn(5, generator=g),
            "kernel": kernel,
            "a": {"count": torch.tensor(2**62 + seed), "empty": {}, "flag": torch.tensor(True)},
            "filled": torch.tensor([True, False, True]),
            "rate": torch.tensor(0.1 + seed),
            "wide": torch.randn(3, generator=g, dtype=torch.float64),
            "half": torch.randn(3, generator=g).bfloat16(),
            "bytes": torch.arange(7, dtype=torch.uint8),
            "nothing": torch.empty(0, 3, dtype=torch.int64),
            "odd": odd,
        },
        "kept": {"params": {}, "buffers": {"layer.0.running_mean": torch.randn(8, generator=g)}},
        "opt": {},
    }


def put(memory: ClientMemory, round: int, memories: dict) -> None:
    """What these clients remember after a round, all of whose uploads counted."""
    for client, value in memories.items():
        memory.stage(round, client, value)
    memory.commit(round, memories)


def same(a: dict, b: dict) -> bool:
    """Equal to the bit, with names in the same order at every level."""
    if list(a) != list(b):
        return False
    for x, y in zip(a.values(), b.values(), strict=True):
        if isinstance(x, dict) != isinstance(y, dict):
            return False
        if isinstance(x, dict):
            if not same(x, y):
                return False
        elif (x.dtype, x.shape, x.stride()) != (y.dtype, y.shape, y.stride()) or store.raw_bytes(x) != store.raw_bytes(
            y
        ):
            return False
    return True


def test_the_comparison_used_here_sees_order_type_and_bits():
    a = {"x": torch.zeros(2), "y": {"z": torch.ones(1)}}
    assert same(a, {"x": torch.zeros(2), "y": {"z": torch.ones(1)}})
    assert not same(a, {"y": {"z": torch.ones(1)}, "x": torch.zeros(2)})
    assert not same(a, {"x": -torch.zeros(2), "y": {"z": torch.ones(1)}})
    assert not same(a, {"x": torch.zeros(2).double(), "y": {"z": torch.ones(1)}})
    assert not same(a, {"x": torch.zeros(2), "y": {}})


def test_what_is_read_back_from_disk_equals_what_was_written_to_the_bit(tmp_path):
    memory = ClientMemory(tmp_path, limit_MB=0)
    put(memory, 4, {7: memory_of(0), 2: memory_of(1)})
    assert not memory.held
    for client, seed in ((7, 0), (2, 1)):
        for _ in range(2):
            got = memory.get(client)
            assert same(got, memory_of(seed))
            assert got["method"]["kernel"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("limit", [0, 0.001, float("inf")])
def test_kernels_that_were_not_channels_last_come_back_so_with_the_same_values(tmp_path, limit):
    kernel = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    memory = ClientMemory(tmp_path, limit)
    put(memory, 0, {0: {"method": {"k": kernel}}})
    memory.restore({0: 0})
    got = memory.get(0)["method"]["k"]
    assert torch.equal(got, kernel)
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_without_a_folder_everything_stays_in_memory_whatever_the_limit():
    memory = ClientMemory(limit_MB=0)
    put(memory, 0, {k: memory_of(k) for k in range(5)})
    assert all(same(memory.get(k), memory_of(k)) for k in range(5))
    assert len(memory.held) == 5


def test_a_client_that_was_never_heard_remembers_nothing(tmp_path):
    for memory in (ClientMemory(), ClientMemory(tmp_path, 0)):
        assert memory.get(3) == {}
        assert 3 not in memory
        put(memory, 0, {5: memory_of(), 1: memory_of()})
        assert 5 in memory
        assert list(memory) == [1, 5]


def test_a_new_memory_replaces_the_old_one_and_the_old_file_stays_for_the_checkpoint_before(tmp_path):
    memory = ClientMemory(tmp_path, 0)
    put(memory, 0, {1: memory_of(0)})
    put(memory, 3, {1: memory_of(1)})
    assert memory.index == {1: 3}
    assert same(memory.get(1), memory_of(1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1-0.safetensors", "1-3.safetensors"]
    memory.restore({1: 0})
    assert same(memory.get(1), memory_of(0))


def test_held_bytes_are_never_above_the_limit_and_are_counted_rightly(tmp_path):
    one = tree.num_bytes(memory_of())
    limit = 2.5 * one / MB
    memory, rng = ClientMemory(tmp_path, limit), torch.Generator().manual_seed(0)
    written = {}
    for r in range(60):
        client = int(torch.randint(6, (), generator=rng))
        if client in written and r % 3:
            assert same(memory.get(client), memory_of(written[client]))
        else:
            put(memory, r, {client: memory_of(r)})
            written[client] = r
        assert memory.bytes == sum(tree.num_bytes(held) for held in memory.held.values()) <= limit * MB
        assert len(memory.held) <= 2
    assert len(memory.held) == 2
    assert len(written) == 6


def test_a_memory_larger_than_the_limit_is_read_from_disk_each_time(tmp_path):
    small = {"method": {"x": torch.ones(2)}}
    memory = ClientMemory(tmp_path, 100 / MB)
    put(memory, 0, {0: small, 1: memory_of()})
    assert memory.bytes <= 100
    assert same(memory.get(1), memory_of())
    assert memory.bytes <= 100
    assert same(memory.get(0), small)


def test_whoever_was_used_longest_ago_leaves_first(tmp_path):
    memory = ClientMemory(tmp_path, 3 * tree.num_bytes(memory_of()) / MB)
    put(memory, 0, {k: memory_of(k) for k in (0, 1, 2)})
    memory.get(0)
    put(memory, 1, {3: memory_of(3)})
    assert [client for client, _ in memory.held] == [2, 0, 3]
    put(memory, 2, {2: memory_of(9)})
    memory.get(1)  # from disk
    assert [client for client, _ in memory.held] == [3, 2, 1]


def test_restore_forgets_what_is_held_and_reads_the_round_that_is_named(tmp_path):
    memory = ClientMemory(tmp_path, float("inf"))
    put(memory, 0, {k: memory_of(k) for k in range(3)})
    put(memory, 1, {k: memory_of(10 + k) for k in range(3)})
    index = {0: 1, 2: 0}
    memory.restore(index)
    assert (memory.bytes, len(memory.held), list(memory)) == (0, 0, [0, 2])
    assert same(memory.get(0), memory_of(10))
    assert same(memory.get(2), memory_of(2))
    assert memory.get(1) == {}
    put(memory, 2, {0: memory_of(20)})
    assert index == {0: 1, 2: 0}  # the checkpoint's own copy


@pytest.mark.parametrize("limit", [0, float("inf")])
def test_prune_keeps_exactly_the_files_that_the_indices_name(tmp_path, limit):
    memory = ClientMemory(tmp_path / "clients", limit)
    for r in range(4):
        put(memory, r, {k: memory_of(r) for k in (1, 11, 2)})
    (tmp_path / "beside.safetensors").write_bytes(b"")
    memory.prune({1: 3, 11: 2}, {1: 2, 2: 0, 11: 2})
    left = {p.name for p in (tmp_path / "clients").iterdir()}
    assert left == {"1-3.safetensors", "11-2.safetensors", "1-2.safetensors", "2-0.safetensors"}
    assert (tmp_path / "beside.safetensors").exists()
    memory.prune()
    assert list((tmp_path / "clients").iterdir()) == []


def test_prune_without_a_folder_or_before_it_exists_does_nothing(tmp_path):
    ClientMemory().prune({0: 0})
    ClientMemory(tmp_path / "none").prune({0: 0})
    assert list(tmp_path.iterdir()) == []


def truncate(path, share=0.5):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


DAMAGES = {
    "cut in half": truncate,
    "a byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "a bit flipped": flip,
    "missing": lambda path: path.unlink(),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_an_error_that_names_the_client_and_is_refused_when_a_run_resumes(tmp_path, damage):
    memory = ClientMemory(tmp_path, 0)
    put(memory, 0, {k: memory_of(k) for k in (3, 42)})
    DAMAGES[damage](tmp_path / "42-0.safetensors")
    with pytest.raises(UserError, match=r"client 42 .*run again to resume"):
        memory.get(42)
    assert same(memory.get(3), memory_of(3))
    with pytest.raises((ValueError, OSError)):
        memory.restore({3: 0, 42: 0})
    memory.restore({3: 0})
    assert list(memory) == [3]


def play(method, memory=None, rounds=4, data=None, **options):
    """The server after some rounds, and the engine."""
    w = toy.worker(method, **options)
    engine = Serial(w, data or toy.federation(), memory)
    start = begin(w.net, method, 0, w.bn_stats)
    loop = federate(start, method, engine, cohort=1 if method.pooled else 4, seed=0, traffic=Traffic())
    return list(islice(loop, rounds))[-1].server, engine


@pytest.mark.parametrize("method", [Scaffold(), Moon(projection=4)], ids=["scaffold", "moon"])
@pytest.mark.parametrize("bn_stats", ["average", "local"])
def test_the_limit_does_not_change_a_bit_of_the_result(tmp_path, method, bn_stats):
    want, free = play(method, bn_stats=bn_stats)
    largest = max(tree.num_bytes(free.memory.get(k)) for k in free.memory)
    for name, limit in (("none", 0.0), ("two clients", 2.2 * largest / MB), ("all", float("inf"))):
        got, engine = play(method, ClientMemory(tmp_path / name, limit), bn_stats=bn_stats)
        assert same(got._asdict(), want._asdict())
        assert list(engine.memory) == list(free.memory)
        assert all(same(engine.memory.get(k), free.memory.get(k)) for k in free.memory)
        assert (len(engine.memory.held) < len(list(engine.memory))) == (name != "all")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in METHODS),
        *((name, {"bn_stats": "local", "persist_optimizer": True}) for name in ("moon", "scaffold", "feddyn")),
    ],
)
def test_what_any_methods_clients_remember_survives_the_disk(tmp_path, name, options):
    """Also where two parts of a memory are one and the same tensor."""
    method = METHODS[name]()
    got, _ = play(method, ClientMemory(tmp_path, 0), rounds=2, **options)
    want, _ = play(method, rounds=2, **options)
    assert same(got._asdict(), want._asdict())


def test_a_queue_of_previous_models_survives_the_disk(tmp_path):
    """At first several places of the queue hold the same model."""
    method = Moon(projection=4, queue=3)
    got, engine = play(method, ClientMemory(tmp_path, 0), rounds=3)
    want, free = play(method, rounds=3)
    assert same(got._asdict(), want._asdict())
    assert all(same(engine.memory.get(k), free.memory.get(k)) for k in free.memory)


@pytest.mark.parametrize("limit", [0.0, 1.0, float("inf")])
def test_a_staged_memory_counts_only_when_it_is_committed(tmp_path, limit):
    memory = ClientMemory(tmp_path, limit_MB=limit)
    put(memory, 0, {1: memory_of(1), 2: memory_of(2)})
    for client in (1, 2, 3):
        memory.stage(1, client, memory_of(10 + client))
    assert same(memory.get(1), memory_of(1))  # nothing counts yet
    memory.commit(1, [2, 3, 9])  # 9 staged nothing
    assert [same(memory.get(k), memory_of(n)) for k, n in ((1, 1), (2, 12), (3, 13))] == [True] * 3
    assert memory.index == {1: 0, 2: 1, 3: 1}
    assert memory.bytes == sum(tree.num_bytes(x) for x in memory.held.values())
    memory.prune(memory.index)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{k}-{memory.index[k]}.safetensors" for k in (1, 2, 3)]


def test_a_whole_cohort_in_training_stays_within_the_limit(tmp_path):
    memory = ClientMemory(tmp_path, limit_MB=2.5 * tree.num_bytes(memory_of()) / MB)
    for client in range(20):
        memory.stage(0, client, memory_of(client))
        assert memory.bytes <= memory.limit
        assert len(memory.held) <= 2
    memory.commit(0, range(20))
    assert all(same(memory.get(k), memory_of(k)) for k in range(20))
