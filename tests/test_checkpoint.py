from collections import Counter
from itertools import islice

import pytest
import torch
import toy
from test_memory import memory_of, put, same

from fedprior import store
from fedprior.checkpoint import Checkpoints, State, read
from fedprior.engines.serial import Serial
from fedprior.errors import UserError
from fedprior.federate import begin, federate
from fedprior.memory import ClientMemory
from fedprior.method import Server
from fedprior.methods import METHODS, Scaffold
from fedprior.optim import SGD, Adam
from fedprior.traffic import Traffic


def covering(there: dict[str, int]):
    """As a record with line files of these lengths would judge."""

    def cover(lengths: dict[str, int], done: int) -> None:
        if any(there.get(name, 0) < length for name, length in lengths.items()):
            raise ValueError("too short")

    return cover


LENGTHS = {"metrics": 100, "timings": 50}


def state_of(done: int, index: dict | None = None) -> State:
    """A state with every kind of leaf, names in no order, and counters in the order in which groups came."""
    parts = memory_of(done)
    server = Server(
        {"params": parts["method"], "buffers": parts["kept"]["buffers"]},
        {"velocity": {"z": torch.full((5,), 0.1 * done)}, "t": torch.tensor(done)},
        {"control": {"b": torch.ones(2), "a": torch.zeros(2)}, "empty": {}},
    )
    traffic = Traffic(Counter({"delta": 2**53 + done, "buffers": 0, "control": 7}), Counter({"params": 3 * done}))
    lengths = {name: length * done // 10 for name, length in LENGTHS.items()}
    return State(done, server, index or {}, traffic, lengths, 0.1 + done)


def equal(a: State, b: State) -> bool:
    return (
        same(a.server._asdict(), b.server._asdict())
        and list(a.traffic.up.items()) == list(b.traffic.up.items())
        and list(a.traffic.down.items()) == list(b.traffic.down.items())
        and (a.done, a.memories, a.lengths, a.seconds) == (b.done, b.memories, b.lengths, b.seconds)
    )


def names(folder) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def three_rounds(folder, rounds=3) -> tuple[ClientMemory, dict[int, State]]:
    """Rounds 1, 2, ... saved; client 0 is heard in each, client `done` once."""
    checkpoints, memory, states = Checkpoints(folder), ClientMemory(folder / "clients", 0), {}
    for done in range(1, rounds + 1):
        put(memory, done - 1, {0: memory_of(done), done: memory_of(100 + done)})
        states[done] = state_of(done, dict(memory.index))
        checkpoints.save(states[done], memory)
    return memory, states


def load(folder, lengths=LENGTHS) -> tuple[State | None, ClientMemory]:
    """As another process would."""
    memory = ClientMemory(folder / "clients", 0)
    return Checkpoints(folder).load(memory, covering(lengths)), memory


def test_a_state_comes_back_to_the_bit_with_its_counters_and_the_order_of_its_names(tmp_path):
    memory = ClientMemory(tmp_path / "clients")
    put(memory, 1, {k: memory_of(k) for k in (11, 3)})
    state = state_of(7, dict(memory.index))
    Checkpoints(tmp_path).save(state, memory)
    got, _ = load(tmp_path)
    assert got is not None
    assert equal(got, state)
    order = list(state.server.weights["params"])
    assert list(got.server.weights["params"]) == order != sorted(order)
    assert got.traffic.up["delta"] == 2**53 + 7  # no float in between
    assert got.server.weights["params"]["kernel"].is_contiguous(memory_format=torch.channels_last)
    assert got.memories == {11: 1, 3: 1}


def test_counters_that_came_back_go_on_counting(tmp_path):
    Checkpoints(tmp_path).save(state_of(1), ClientMemory(tmp_path / "clients"))
    got, _ = load(tmp_path)
    got.traffic.sent({"weights": {"params": {"x": torch.zeros(2)}}, "shared": {"new": torch.zeros(1)}}, 3)
    assert got.traffic.down == {"params": 3 + 24, "new": 12}


def test_the_newest_of_two_generations_is_loaded_and_no_third_is_kept(tmp_path):
    memory, states = three_rounds(tmp_path, rounds=5)
    assert names(tmp_path) == [
        *(f"clients/{name}.safetensors" for name in ("0-3", "0-4", "1-0", "2-1", "3-2", "4-3", "5-4")),
        "round-4.safetensors",
        "round-5.safetensors",
    ]
    got, restored = load(tmp_path)
    assert equal(got, states[5])
    assert restored.index == memory.index == {0: 4, 1: 0, 2: 1, 3: 2, 4: 3, 5: 4}
    assert same(restored.get(0), memory_of(5))
    assert same(restored.get(2), memory_of(102))


def test_rounds_are_numbers_and_not_words(tmp_path):
    """Round 10 is newer than round 9."""
    _, states = three_rounds(tmp_path, rounds=10)
    assert equal(load(tmp_path)[0], states[10])


def test_without_any_generation_there_is_no_state_and_no_memory(tmp_path):
    state, memory = load(tmp_path)
    assert state is None
    assert list(memory) == []
    put(memory, 0, {1: memory_of()})  # from a round whose checkpoint was never written
    state, memory = load(tmp_path)
    assert state is None
    assert memory.get(1) == {}
    put(memory, 0, {1: memory_of()})
    assert Checkpoints(tmp_path).load(memory, covering(LENGTHS)) is None
    assert memory.get(1) == {}  # nor one that is in memory


def cut(share):
    return lambda path: path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def flipped(where):
    def damage(path):
        raw = bytearray(path.read_bytes())
        raw[int(where * (len(raw) - 1))] ^= 0x01  # not another bit: the last byte is a bool, true whichever are set
        path.write_bytes(raw)

    return damage


DAMAGES = {
    "empty": cut(0),
    "cut within the length": lambda path: path.write_bytes(path.read_bytes()[:5]),
    "cut within the header": cut(0.2),
    "cut in half": cut(0.5),
    "cut near the end": cut(0.999),
    "a byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "first byte flipped": flipped(0),
    "header flipped": flipped(0.1),
    "middle flipped": flipped(0.5),
    "last byte flipped": flipped(1),
    "missing": lambda path: path.unlink(),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_newest_generation_costs_one_round(tmp_path, damage):
    _, states = three_rounds(tmp_path)
    DAMAGES[damage](tmp_path / "round-3.safetensors")
    got, memory = load(tmp_path)
    assert equal(got, states[2])
    assert memory.index == {0: 1, 1: 0, 2: 1}
    assert same(memory.get(0), memory_of(2))  # not what it remembered after round 3
    assert memory.get(3) == {}


@pytest.mark.parametrize("damage", DAMAGES)
def test_with_both_generations_torn_a_run_says_so_and_removes_nothing(tmp_path, damage):
    three_rounds(tmp_path)
    for done in (2, 3):
        DAMAGES[damage](tmp_path / f"round-{done}.safetensors")
    if damage == "missing":
        assert load(tmp_path)[0] is None
        return
    before = names(tmp_path)
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole .*choose another name="):
        load(tmp_path)
    assert names(tmp_path) == before


def test_a_first_checkpoint_that_is_torn_costs_its_one_round(tmp_path):
    three_rounds(tmp_path, rounds=1)
    cut(0.5)(tmp_path / "round-1.safetensors")
    got, memory = load(tmp_path)
    assert got is None
    assert list(memory) == []


def test_a_disk_that_cannot_be_read_costs_nothing(tmp_path, monkeypatch):
    _, states = three_rounds(tmp_path)
    before = names(tmp_path)

    def unreadable(path):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(store, "read_tree", unreadable)
        with pytest.raises(UserError, match="Input/output error"):
            load(tmp_path)
    assert names(tmp_path) == before
    assert equal(load(tmp_path)[0], states[3])


@pytest.mark.parametrize("about", [{}, {"done": 3}, {"done": 3, "index": [], "up": {}, "down": {}, "lengths": {}}])
def test_a_whole_file_of_another_kind_is_passed_over(tmp_path, about):
    _, states = three_rounds(tmp_path)
    store.write_tree(tmp_path / "round-3.safetensors", states[3].server._asdict(), about)
    assert equal(load(tmp_path)[0], states[2])
    store.write_tree(tmp_path / "round-3.safetensors", {"images": {"x": torch.ones(1)}}, about)
    assert equal(load(tmp_path)[0], states[2])


def test_a_torn_older_generation_costs_nothing(tmp_path):
    _, states = three_rounds(tmp_path)
    cut(0.5)(tmp_path / "round-2.safetensors")
    assert equal(load(tmp_path)[0], states[3])


@pytest.mark.parametrize("name", LENGTHS)
def test_a_generation_that_counts_on_more_bytes_than_the_line_files_hold_is_passed_over(tmp_path, name):
    _, states = three_rounds(tmp_path)
    enough = states[3].lengths
    assert equal(load(tmp_path, enough)[0], states[3])
    assert equal(load(tmp_path, {k: v + 9 for k, v in enough.items()})[0], states[3])  # lines of a round cut short
    assert equal(load(tmp_path, enough | {name: enough[name] - 1})[0], states[2])


@pytest.mark.parametrize("lengths", [{}, {"metrics": 0, "timings": 0}, {"metrics": 10**6}])
def test_generations_beside_line_files_that_are_gone_are_worth_nothing(tmp_path, lengths):
    three_rounds(tmp_path)
    before = names(tmp_path)
    with pytest.raises(UserError, match="too short"):
        load(tmp_path, lengths)
    assert names(tmp_path) == before


@pytest.mark.parametrize("damage", ["missing", "cut in half", "last byte flipped", "empty"])
def test_a_generation_whose_clients_memories_are_not_all_whole_is_passed_over(tmp_path, damage):
    _, states = three_rounds(tmp_path)
    DAMAGES[damage](tmp_path / "clients" / "3-2.safetensors")  # only round 3 needs it
    got, memory = load(tmp_path)
    assert equal(got, states[2])
    assert memory.index == states[2].memories
    assert same(memory.get(0), memory_of(2))


def test_with_a_memory_gone_that_both_generations_need_a_run_says_which(tmp_path):
    three_rounds(tmp_path)
    (tmp_path / "clients" / "1-0.safetensors").unlink()
    before = names(tmp_path)
    with pytest.raises(UserError, match=r"1-0\.safetensors"):
        load(tmp_path)
    assert names(tmp_path) == before


def test_what_a_killed_round_left_is_not_used_and_goes_at_the_next_save(tmp_path):
    """Killed after the clients' memories of round 4 were written and before its checkpoint was."""
    memory, states = three_rounds(tmp_path)
    put(memory, 3, {0: memory_of(4), 9: memory_of(109)})
    checkpoints, resumed = Checkpoints(tmp_path), ClientMemory(tmp_path / "clients", 0)
    got = checkpoints.load(resumed, covering(LENGTHS))
    assert equal(got, states[3])
    assert same(resumed.get(0), memory_of(3))
    assert resumed.get(9) == {}
    put(resumed, 3, {0: memory_of(44)})  # the round again, this time without client 9
    checkpoints.save(state_of(4, dict(resumed.index)), resumed)
    assert names(tmp_path) == [
        *(f"clients/{name}.safetensors" for name in ("0-2", "0-3", "1-0", "2-1", "3-2")),
        "round-3.safetensors",
        "round-4.safetensors",
    ]
    assert same(load(tmp_path)[1].get(0), memory_of(44))


def test_after_falling_back_the_next_save_keeps_what_was_fallen_back_on(tmp_path):
    _, states = three_rounds(tmp_path)
    cut(0.5)(tmp_path / "round-3.safetensors")
    checkpoints, memory = Checkpoints(tmp_path), ClientMemory(tmp_path / "clients", 0)
    assert equal(checkpoints.load(memory, covering(LENGTHS)), states[2])
    put(memory, 2, {0: memory_of(33)})
    again = state_of(3, dict(memory.index))
    checkpoints.save(again, memory)
    assert equal(load(tmp_path)[0], again)
    cut(0.5)(tmp_path / "round-3.safetensors")
    got, memory = load(tmp_path)
    assert equal(got, states[2])
    assert same(memory.get(0), memory_of(2))


def test_a_save_that_dies_midway_leaves_both_generations(tmp_path, monkeypatch):
    memory, states = three_rounds(tmp_path)
    before = names(tmp_path)
    checkpoints, memory = Checkpoints(tmp_path), ClientMemory(tmp_path / "clients", 0)
    checkpoints.load(memory, covering(LENGTHS))

    def full(*args, **options):
        raise OSError("no space left")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save(state_of(4, dict(memory.index)), memory)
    assert names(tmp_path) == before
    assert equal(load(tmp_path)[0], states[3])


def test_reading_one_generation_that_is_missing_or_torn_raises(tmp_path):
    three_rounds(tmp_path)
    cut(0.5)(tmp_path / "round-2.safetensors")
    with pytest.raises(ValueError, match="damaged"):
        read(tmp_path / "round-2.safetensors")
    with pytest.raises(OSError, match="round-1"):
        read(tmp_path / "round-1.safetensors")


def run(method, folder, rounds, stop_after=None, **options):
    """Rounds of a federation with a checkpoint after each; a new process takes over after `stop_after`."""
    while True:
        w = toy.worker(method, **options)
        checkpoints, memory = Checkpoints(folder), ClientMemory(folder / "clients", 0)
        engine = Serial(w, toy.federation(), memory)
        state = checkpoints.load(memory, covering({}))
        if state is None:
            state = State(0, begin(w.net, method, 0, w.bn_stats), {}, Traffic(), {}, 0.0)
        traffic, first = state.traffic, state.done
        if first == rounds:
            return state
        cohort = 1 if method.pooled else 3
        loop = federate(state.server, method, engine, cohort=cohort, seed=0, traffic=traffic, first=first)
        for result in islice(loop, (rounds if stop_after in (None, first) else stop_after) - first):
            checkpoints.save(State(result.number + 1, result.server, memory.index, traffic, {}, 0.0), memory)


@pytest.mark.parametrize(
    ("name", "bn_stats"),
    [*((name, "average") for name in METHODS), ("moon", "local"), ("scaffold", "local"), ("fedproto", "local")],
)
def test_a_run_that_goes_on_from_its_checkpoint_ends_like_one_that_was_never_interrupted(tmp_path, name, bn_stats):
    """Server, its optimiser and state, clients' memories, counters: all methods, to the bit (AT-R06)."""
    method = METHODS[name]()
    options = {"bn_stats": bn_stats, "steps": 2}
    whole = run(method, tmp_path / "whole", 3, **options)
    halves = run(method, tmp_path / "halves", 3, stop_after=2, **options)
    assert equal(halves, whole)
    for path in (tmp_path / "whole" / "clients").glob("*"):
        assert same(store.read_tree(path)[0], store.read_tree(tmp_path / "halves" / "clients" / path.name)[0])


@pytest.mark.parametrize("server", [SGD(lr=1.0, momentum=0.9), Adam(bias_correction=True)], ids=["momentum", "adam"])
def test_the_servers_optimiser_goes_on_where_it_was(tmp_path, server):
    method = Scaffold(server=server)
    whole = run(method, tmp_path / "whole", 4, steps=2, persist_optimizer=True, optimizer=SGD(lr=0.05, momentum=0.5))
    for stop in (1, 2, 3):
        parts = run(
            method,
            tmp_path / str(stop),
            4,
            stop_after=stop,
            steps=2,
            persist_optimizer=True,
            optimizer=SGD(lr=0.05, momentum=0.5),
        )
        assert equal(parts, whole)


def small() -> dict:
    return {
        "b": {"w.0": torch.arange(6.0).view(2, 3), "none": {}},
        "a": torch.tensor([True, False]),
        "n": torch.tensor(3),
    }


def test_a_flipped_byte_anywhere_in_a_file_is_noticed_or_changes_nothing(tmp_path):
    """Every byte of a small file: length, header, digest, padding and values. (A bool is true whichever of its
    bits are set, and padding is just spaces.)"""
    path, about = tmp_path / "x.safetensors", {"round": 3, "note": "é"}
    store.write_tree(path, small(), about)
    raw, noticed = path.read_bytes(), 0
    for where in range(len(raw)):
        for mask in (0x01, 0xFF):
            path.write_bytes(raw[:where] + bytes([raw[where] ^ mask]) + raw[where + 1 :])
            try:
                value, note = store.read_tree(path)
            except (ValueError, OSError):
                noticed += 1
                continue
            assert same(value, small()), (where, mask)
            assert note == about, (where, mask)
    assert noticed > 1.7 * len(raw)


def test_a_file_cut_short_is_noticed_wherever(tmp_path):
    path = tmp_path / "x.safetensors"
    store.write_tree(path, small())
    raw = path.read_bytes()
    for length in {*range(0, len(raw), 5), len(raw) - 1}:
        path.write_bytes(raw[:length])
        with pytest.raises((ValueError, OSError)):
            store.read_tree(path)


def test_values_of_a_larger_tree_are_covered_by_the_digest(tmp_path):
    path, about = tmp_path / "x.safetensors", {"a": [1, None, "b"]}
    store.write_tree(path, memory_of(), about)
    value, note = store.read_tree(path)
    assert same(value, memory_of_as_stored())
    assert note == about
    raw = path.read_bytes()
    for where in range(0, len(raw), len(raw) // 40):
        path.write_bytes(raw[:where] + bytes([raw[where] ^ 0x04]) + raw[where + 1 :])
        try:
            value, note = store.read_tree(path)
        except (ValueError, OSError):
            continue
        assert same(value, memory_of_as_stored()), where
        assert note == about, where


def memory_of_as_stored() -> dict:
    """A file has no memory layout: what is read is contiguous."""
    value = memory_of()
    value["method"]["kernel"] = value["method"]["kernel"].contiguous()
    return value


def test_two_files_with_their_digests_swapped_are_both_damaged(tmp_path):
    """A digest of the same length from another file, so that the header stays well formed."""
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    store.write_tree(a, {"x": torch.zeros(3)}, {"k": 1})
    store.write_tree(b, {"x": torch.zeros(3)}, {"k": 2})  # the same tensors, other words about them
    digests = []
    from safetensors import safe_open

    for path in (a, b):
        with safe_open(path, framework="pt") as f:
            digests.append(f.metadata()["digest"].encode())
    assert digests[0] != digests[1]
    for path, (old, new) in ((a, digests), (b, digests[::-1])):
        path.write_bytes(path.read_bytes().replace(old, new))
        with pytest.raises(ValueError, match="digest does not fit"):
            store.read_tree(path)


@pytest.mark.parametrize("value", [{}, {"a": {}}, {"a": {"b": {}}, "c": torch.zeros(0)}])
def test_trees_with_little_or_nothing_in_them_survive_the_disk(tmp_path, value):
    store.write_tree(tmp_path / "x.safetensors", value)
    got, about = store.read_tree(tmp_path / "x.safetensors")
    assert same(got, value)
    assert about == {}


def test_a_tree_in_which_one_tensor_stands_twice_survives_the_disk(tmp_path):
    x = torch.arange(4.0)
    value = {"a": {"x": x}, "b": {"x": x}, "part": x[1:3]}
    store.write_tree(tmp_path / "x.safetensors", value)
    assert same(store.read_tree(tmp_path / "x.safetensors")[0], value)
