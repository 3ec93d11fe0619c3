import hashlib
import io
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedprior import seeds, store
from fedprior.data import table
from fedprior.data.table import Federation
from fedprior.errors import UserError
from fedprior.prepare import images, synthesis
from fedprior.prepare.balance import BALANCES, BalanceToMax, FixedBudget, Ratio
from fedprior.prepare.images import ImageFolder
from fedprior.priors import prompts

CLASSES = ("cat", "lawn_mower", "frog")
SIZE = (5, 7)


@dataclass
class Noise:
    """A prior whose images are noise, a function of prompt and seed alone; it can fail on demand."""

    name: str = "noise"
    revision: str = "r1"
    steps: int = 20
    black: object = lambda prompt, seed: False
    breaks_at: int | None = None  # the call that raises
    calls: list[list[tuple[str, int]]] = field(default_factory=list)

    @property
    def settings(self):
        return {"scheduler": "Euler", "steps": self.steps, "guidance": 7.0, "dtype": "fp32"}

    @property
    def asked(self):
        return [pair for call in self.calls for pair in call]

    def generate(self, prompts, image_seeds, size):
        if len(self.calls) == self.breaks_at:
            raise KeyboardInterrupt
        self.calls.append(list(zip(prompts, image_seeds, strict=True)))
        return torch.stack([self.image(*pair, size) for pair in self.calls[-1]])

    def image(self, prompt, seed, size=SIZE):
        if self.black(prompt, seed):
            return torch.zeros((3, *size), dtype=torch.uint8)
        word = int.from_bytes(hashlib.sha256(f"{prompt}|{seed}".encode()).digest()[:8], "big")
        return torch.from_numpy(np.random.default_rng(word).integers(256, size=(3, *size), dtype=np.uint8))


def folder_of(fed, prior, policy, seed):
    words = synthesis.wording(policy, fed.classes, fed.domains, "")
    return ImageFolder(prior=prior, wording=words, size=SIZE, seed=seed, attempts=policy.attempts)


def synthesise(fed, prior, policy, *, seed, progress=None):
    return synthesis.synthesise(fed, folder_of(fed, prior, policy, seed), policy, progress=progress)


def federation(counts):
    """Clients with the given numbers of real rows, in an order that mixes them."""
    owner, label = [], []
    for k, row in enumerate(counts):
        for y, n in enumerate(row):
            owner += [k] * n
            label += [y] * n
    order = np.random.default_rng(0).permutation(len(label))
    owner, label = np.array(owner)[order], np.array(label)[order]
    image = torch.from_numpy(np.random.default_rng(1).integers(256, size=(len(label), 3, *SIZE), dtype=np.uint8))
    real = table.make(image, torch.from_numpy(label))
    clients = tuple(torch.from_numpy(np.flatnonzero(owner == k)) for k in range(len(counts)))
    return Federation(table=real, clients=clients, test=table.take(real, torch.arange(1)), classes=CLASSES)


FED = federation([(25, 10, 0), (0, 0, 0), (3, 0, 30), (0, 8, 0)])
NEED = np.array([(0, 15, 25), (0, 0, 0), (27, 30, 0), (8, 0, 8)])


def drawn(fed, client, label):
    """A client's synthetic images of a class as bytes, in its order."""
    shard = fed.shard(client)
    rows = shard["synthetic"] & (shard["label"] == label)
    return [x.numpy().tobytes() for x in shard["image"][rows]]


def same(a, b):
    return all(torch.equal(a.table[c], b.table[c]) for c in a.table) and all(
        torch.equal(x, y) for x, y in zip(a.clients, b.clients, strict=True)
    )


def blocks(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def rows_of(path):
    import pyarrow.parquet as pq

    return pq.ParquetFile(path).read().to_pylist()


def test_every_client_gets_exactly_the_computed_number_of_each_class():
    out, report = synthesise(FED, Noise(), BalanceToMax(), seed=3)
    assert (out.counts(synthetic=True) == NEED).all()
    assert (out.counts(synthetic=False) == FED.counts()).all()
    assert out.counts().tolist() == [[25] * 3, [0] * 3, [30] * 3, [8] * 3]
    assert (report.before == FED.counts()).all()
    assert (report.after == out.counts()).all()
    assert (report.generated, report.reused, report.faulty) == (27 + 30 + 25, 0, 0)
    assert (report.rows, report.repeats) == (NEED.sum(), 0)


def test_real_rows_stay_and_synthetic_ones_are_flagged_with_ids_of_their_own():
    out, _ = synthesise(FED, Noise(), BalanceToMax(), seed=3)
    n = len(FED.table["label"])
    for name, column in FED.table.items():
        assert torch.equal(out.table[name][:n], column)
    for before, after in zip(FED.clients, out.clients, strict=True):
        assert torch.equal(after[: len(before)], before)
        assert out.table["synthetic"][after[len(before) :]].all()
    assert out.table["synthetic"].tolist() == [False] * n + [True] * (27 + 30 + 25)
    assert len(out.table["id"].unique()) == len(out.table["id"])
    assert not out.test["synthetic"].any()


def test_an_image_follows_from_seed_class_client_and_index_alone():
    """Each stored row, computed a second time from the documented streams."""
    prior = Noise()
    for policy in (BalanceToMax(), BalanceToMax(pool="per_client")):
        _, report = synthesise(FED, prior, policy, seed=3)
        for path in report.folders[0].glob("*.parquet"):
            for row in rows_of(path):
                key = (row["label"], row["client"] + 1, row["index"])
                assert row["template"] == prompts.CLIP[seeds.stream(3, "template", *key).integers(18)]
                assert row["prompt"] == row["template"].format(CLASSES[row["label"]].replace("_", " "))
                assert row["seed"] == seeds.number(3, "synthetic", *key, 0)
                assert row["image"]["path"] == f"{row['label']:04}-{row['index']:06}.png"
                pixels = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))
                assert (pixels == prior.image(row["prompt"], row["seed"]).permute(1, 2, 0).numpy()).all()
                assert row["sha256"] == hashlib.sha256(row["image"]["bytes"]).hexdigest()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=4).filter(lambda c: sum(map(sum, c))),
    st.sampled_from([*BALANCES]),
    st.sampled_from(["shared", "per_client"]),
    st.integers(0, 5),
)
def test_counts_and_evenness_hold_for_any_federation(counts, name, pool, size):
    fed = federation(counts)
    policy = BALANCES[name](pool=pool, pool_size=0 if pool == "per_client" else size)
    need = policy.allocate(fed.counts())
    out, report = synthesise(fed, Noise(), policy, seed=1)
    assert (out.counts(synthetic=True) == need).all()
    pools = [size or need[:, y].max() for y in range(3)] if pool == "shared" else [10**9] * 3
    repeats = 0
    for k in range(len(counts)):
        for y in range(3):
            times = Counter(drawn(out, k, y))
            repeats += sum(times.values()) - len(times)
            assert max(times.values(), default=0) <= -(-need[k, y] // max(1, pools[y]))
    assert report.repeats == repeats


def test_synthetic_rows_that_are_there_already_do_not_count_as_real():
    once, first = synthesise(FED, Noise(), BalanceToMax(), seed=3)
    twice, report = synthesise(once, Noise(), BalanceToMax(), seed=3)
    assert (report.before == FED.counts()).all()
    assert report.rows == first.rows
    assert (twice.counts(synthetic=True) == 2 * NEED).all()
    assert (twice.counts(synthetic=False) == FED.counts()).all()


def test_a_client_draws_no_image_twice_and_clients_draw_differently():
    out, _ = synthesise(FED, Noise(), BalanceToMax(pool_size=40), seed=3)
    first, third = drawn(out, 0, 1), drawn(out, 2, 1)
    assert len(set(first)) == 15
    assert len(set(third)) == 30
    assert third[:15] != first


def test_a_small_pool_repeats_evenly():
    out, report = synthesise(FED, Noise(), BalanceToMax(pool_size=7), seed=3)
    assert sorted(Counter(drawn(out, 2, 1)).values()) == [4, 4, 4, 4, 4, 5, 5]  # 30 of 7
    assert sorted(Counter(drawn(out, 0, 1)).values()) == [2] * 6 + [3]  # 15 of 7
    assert report.generated == 21
    assert report.repeats == sum(max(0, m - 7) for m in NEED.flatten().tolist())


def test_per_client_images_are_each_clients_own():
    out, report = synthesise(FED, Noise(), BalanceToMax(pool="per_client"), seed=3)
    assert report.generated == NEED.sum()
    every = [x for k in range(4) for y in range(3) for x in drawn(out, k, y)]
    assert len(set(every)) == len(every) == NEED.sum()
    other, _ = synthesise(federation([(0, 8, 0)] * 4), Noise(), BalanceToMax(pool="per_client"), seed=3)
    assert drawn(other, 3, 0) == drawn(out, 3, 0), "a client's images depended on the other clients"


def test_a_second_run_makes_nothing_and_gives_the_same():
    first, _ = synthesise(FED, Noise(), BalanceToMax(), seed=3)
    prior = Noise()
    again, report = synthesise(FED, prior, BalanceToMax(), seed=3)
    assert prior.calls == []
    assert (report.generated, report.reused) == (0, 82)
    assert same(first, again)


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_an_interrupted_run_goes_on_with_what_is_missing(stop, monkeypatch):
    monkeypatch.setattr(images, "CALL", 11)
    monkeypatch.setattr(images, "BLOCK", 8)
    with monkeypatch.context() as m:
        m.setenv("FEDPRIOR_CACHE", store.cache_folder().as_posix() + "-whole")
        whole_prior = Noise()
        whole, whole_report = synthesise(FED, whole_prior, BalanceToMax(), seed=3)
    cut = Noise(breaks_at=stop)
    with pytest.raises(KeyboardInterrupt):
        synthesise(FED, cut, BalanceToMax(), seed=3)
    rest = Noise()
    out, report = synthesise(FED, rest, BalanceToMax(), seed=3)
    assert cut.calls + rest.calls == whole_prior.calls
    assert report.reused == 11 * stop
    assert same(out, whole)
    assert blocks(report.folders[0]) == blocks(whole_report.folders[0])


def finish():
    synthesise(FED, Noise(), BalanceToMax(), seed=3)


def stop_early():
    with pytest.raises(KeyboardInterrupt):
        synthesise(FED, Noise(breaks_at=1), BalanceToMax(), seed=3)


def grow():
    synthesise(FED, Noise(), BalanceToMax(pool_size=60), seed=3)


def fewer():
    """Ends in the middle of what the other run makes in one call."""
    synthesise(FED, Noise(), BalanceToMax(pool_size=10), seed=3)


def delete():
    for path in (store.cache_folder() / "synthetic").glob("*/*.parquet"):
        path.unlink()


def damage():
    for path in (store.cache_folder() / "synthetic").glob("*/*.parquet"):
        path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("meanwhile", [finish, stop_early, grow, fewer, delete, damage])
@pytest.mark.parametrize("at", [0, 1, 3, 8])
def test_a_folder_that_changes_under_a_run_keeps_every_image_at_its_place(meanwhile, at, monkeypatch):
    """Two runs of one seed share a folder; here the second does its work inside a call of the first one's prior."""
    monkeypatch.setattr(images, "CALL", 7)
    monkeypatch.setattr(images, "BLOCK", 16)
    with monkeypatch.context() as m:
        m.setenv("FEDPRIOR_CACHE", store.cache_folder().as_posix() + "-alone")
        alone, _ = synthesise(FED, Noise(), BalanceToMax(), seed=3)

    class Shared(Noise):
        def generate(self, prompts, image_seeds, size):
            if len(self.calls) == at:
                meanwhile()
            return super().generate(prompts, image_seeds, size)

    out, report = synthesise(FED, Shared(), BalanceToMax(), seed=3)
    assert same(out, alone)
    later, report = synthesise(FED, Noise(), BalanceToMax(), seed=3)
    assert same(later, alone)
    assert report.generated == 0 or meanwhile in (delete, damage)
    for path in report.folders[0].glob("*.parquet"):
        first = int(path.stem[-5:]) * 16
        indices = [row["index"] for row in rows_of(path)]
        assert indices == list(range(first, first + len(indices))), path.name
    if meanwhile is grow:
        larger = synthesise(FED, Noise(), BalanceToMax(pool_size=60), seed=3)[1]
        assert larger.generated == 0, "the slower run cut what the faster one had made"
    assert synthesise(FED, Noise(), BalanceToMax(), seed=3)[1].generated == 0


def test_a_failure_while_writing_leaves_no_half_file(monkeypatch):
    real, written = Path.write_bytes, []

    def full_disk(path, data):
        written.append(path)
        real(path, data)
        if len(written) == 2:
            real(path, data[:100])
            raise OSError("no space left on device")

    with monkeypatch.context() as m:
        m.setattr(Path, "write_bytes", full_disk)
        with pytest.raises(UserError, match=r"no space left on device.*what is there stays.*FEDPRIOR_CACHE"):
            synthesise(FED, Noise(), BalanceToMax(), seed=3)
    folder = written[0].parent
    assert [p.name for p in folder.iterdir()] == ["class-0000_shared_block-00000.parquet"]
    out, report = synthesise(FED, Noise(), BalanceToMax(), seed=3)
    assert report.reused == 27
    assert (out.counts(synthetic=True) == NEED).all()


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "flip", "swap", "foreign"])
def test_a_damaged_file_is_made_again_and_no_other(damage, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(images, "BLOCK", 10)
    first, report = synthesise(FED, Noise(), BalanceToMax(), seed=3)
    before = blocks(report.folders[0])
    victim = report.folders[0] / "class-0001_shared_block-00001.parquet"
    data = victim.read_bytes()
    if damage == "cut":
        victim.write_bytes(data[: len(data) // 2])
    elif damage == "empty":
        victim.write_bytes(b"")
    elif damage == "text":
        victim.write_text("not parquet at all")
    elif damage == "flip":
        at = data.index(b"IDAT") + 8
        victim.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    elif damage == "swap":
        victim.write_bytes(before["class-0001_shared_block-00000.parquet"])
    else:
        pq.write_table(pa.table({"image": [b"x"]}), victim)
    prior = Noise()
    again, report = synthesise(FED, prior, BalanceToMax(), seed=3)
    assert len(prior.asked) == report.generated == 10
    assert report.reused == 72
    assert same(first, again)
    assert blocks(report.folders[0]) == before


def test_a_sealed_file_that_arrow_cannot_read_is_made_again(monkeypatch):
    """Another version of Arrow may lack a codec, which it reports as neither ValueError nor OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def unreadable(path):
        raise pa.ArrowNotImplementedError("no such codec")

    first, _ = synthesise(FED, Noise(), BalanceToMax(), seed=3)
    monkeypatch.setattr(pq, "ParquetFile", unreadable)
    monkeypatch.setattr(images, "CALL", 256)
    again, report = synthesise(FED, Noise(), BalanceToMax(), seed=3)
    assert report.generated == 82
    assert same(first, again)


def test_a_pool_that_grows_keeps_its_images(monkeypatch):
    monkeypatch.setattr(images, "BLOCK", 8)
    _, small = synthesise(FED, Noise(), BalanceToMax(pool_size=5), seed=3)
    old = {(r["label"], r["index"]): r for p in small.folders[0].iterdir() for r in rows_of(p)}
    prior = Noise()
    _, large = synthesise(FED, prior, BalanceToMax(pool_size=12), seed=3)
    new = {(r["label"], r["index"]): r for p in large.folders[0].iterdir() for r in rows_of(p)}
    assert large.folders[0] == small.folders[0]
    assert (large.generated, large.reused, len(prior.asked)) == (21, 15, 21)
    assert len(new) == 36
    assert all(new[place] == row for place, row in old.items())
    prior = Noise()
    out, back = synthesise(FED, prior, BalanceToMax(pool_size=5), seed=3)
    assert prior.calls == []
    assert back.reused == 15
    assert {bytes(i) for i in drawn(out, 2, 0)} == {
        np.asarray(Image.open(io.BytesIO(r["image"]["bytes"]))).transpose(2, 0, 1).tobytes()
        for (label, index), r in old.items()
        if label == 0
    }


def test_faulty_images_are_kept_apart_and_replaced():
    """A third of all seeds give black, so one image in nine stays black after two attempts."""
    prior = Noise(black=lambda prompt, seed: seed % 3 == 0)
    out, report = synthesise(FED, prior, BalanceToMax(attempts=2), seed=3)
    assert (out.counts(synthetic=True) == NEED).all()
    assert (out.table["image"].flatten(1).amax(1) > 0).all()
    stored = [r for p in report.folders[0].iterdir() for r in rows_of(p)]
    bad = [r for r in stored if not r["ok"]]
    assert report.generated == len(stored) - len(bad) == 82
    assert report.faulty == len(bad) > 0
    assert all(r["attempts"] == 2 for r in bad)
    assert {r["attempts"] for r in stored if r["ok"]} == {1, 2}
    for r in stored:
        assert r["seed"] == seeds.number(3, "synthetic", r["label"], 0, r["index"], r["attempts"] - 1)
        assert r["ok"] == (r["seed"] % 3 != 0)
    again, report = synthesise(FED, Noise(), BalanceToMax(attempts=2), seed=3)
    assert (report.generated, report.reused, report.faulty) == (0, 82, len(bad))
    assert same(out, again)


def test_a_prior_that_only_makes_black_images_is_given_up_soon():
    prior = Noise(name="sd/broken", black=lambda prompt, seed: "frog" in prompt)
    fed = federation([(900, 900, 0)])
    for _ in range(2):
        with pytest.raises(UserError, match=r"sd/broken made 64 blank images of 64.*frog.*prior\.dtype=fp32") as e:
            synthesise(fed, prior, BalanceToMax(templates="single"), seed=3)
        assert "\n" not in str(e.value)
    assert len(prior.asked) == 64 * 5, "the second try made images although the folder said enough"


@pytest.mark.parametrize(
    ("prior", "policy", "seed"),
    [
        (Noise(revision="r2"), BalanceToMax(), 3),
        (Noise(steps=21), BalanceToMax(), 3),
        (Noise(), BalanceToMax(templates="single"), 3),
        (Noise(), BalanceToMax(attempts=4), 3),
        (Noise(), BalanceToMax(), 4),
    ],
)
def test_another_prior_template_list_or_seed_has_another_folder(prior, policy, seed):
    _, base = synthesise(FED, Noise(), BalanceToMax(), seed=3)
    _, report = synthesise(FED, prior, policy, seed=seed)
    assert report.folders[0] != base.folders[0]
    assert report.reused == 0


def test_rules_share_a_folder():
    _, base = synthesise(FED, Noise(), BalanceToMax(), seed=3)
    _, report = synthesise(FED, Noise(), FixedBudget(budget=9), seed=3)
    assert report.folders[0] == base.folders[0]
    assert report.generated == 0


def test_progress_counts_up_to_the_images_needed():
    seen = []
    synthesise(FED, Noise(), BalanceToMax(), seed=3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 82), (64, 82), (82, 82), (82, 82)]


def test_nothing_to_make_leaves_everything_alone():
    out, report = synthesise(FED, Noise(), Ratio(ratio=0), seed=3)
    assert same(out, FED)
    assert (report.generated, report.rows, report.folders) == (0, 0, ())


def test_the_folders_are_those_of_the_priors_that_made_the_images():
    policy = BalanceToMax(pool="per_client")

    @contextmanager
    def own(client):
        yield replace(folder_of(FED, Noise(), policy, 3), prior=Noise(revision=f"of {client}"))

    @contextmanager
    def alike(client):
        yield folder_of(FED, Noise(), policy, 3)

    folder = folder_of(FED, Noise(), policy, 3)
    _, report = synthesis.synthesise(FED, folder, policy, own=alike)
    assert report.folders == (folder.path,)
    _, report = synthesis.synthesise(FED, folder, policy, own=own)
    assert len(set(report.folders)) == len(report.folders) == 3  # client 1 has no rows
    for client, path in zip((0, 2, 3), report.folders, strict=True):
        assert {row["revision"] for file in path.iterdir() for row in rows_of(file)} == {f"of {client}"}


def test_images_for_the_server_come_from_no_clients_own_folder():
    folder = folder_of(FED, Noise(), BalanceToMax(), 3)

    def own(client):
        raise AssertionError(f"asked for the folder of {client}")

    made = synthesis.fill(folder, synthesis.with_server([], 3, 2), lambda done, total: None, own)
    assert made == (6, (folder.path,))


def test_the_prior_is_asked_for_full_calls():
    prior = Noise()
    synthesise(federation([(300, 0, 1)]), prior, BalanceToMax(), seed=3)
    assert [len(call) for call in prior.calls] == [64] * 9 + [599 - 9 * 64]


def test_the_folder_opens_as_a_hugging_face_data_set(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / ".hidden" / "a=b"))
    prior = Noise()
    _, report = synthesise(federation([(300, 10, 0)]), prior, BalanceToMax(), seed=3)
    loaded = datasets.load_dataset(str(report.folders[0]), cache_dir=str(tmp_path / "hf"))["train"]
    assert len(loaded) == 590
    assert loaded.features["label"].names == list(CLASSES)
    row = loaded[589]
    assert isinstance(row["image"], Image.Image)
    assert row["image"].size == (7, 5)
    assert (np.asarray(row["image"]) == prior.image(row["prompt"], row["seed"]).permute(1, 2, 0).numpy()).all()
    assert {k: row[k] for k in ("class", "label", "index", "client", "model", "revision", "scheduler")} == {
        "class": "frog",
        "label": 2,
        "index": 299,
        "client": -1,
        "model": "noise",
        "revision": "r1",
        "scheduler": "Euler",
    }
    assert (row["steps"], row["guidance"], row["attempts"], row["ok"]) == (20, 7.0, 1, True)
