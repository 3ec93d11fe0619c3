"""Parts, merging, sudden ends and flipped bytes of a folder of synthetic images."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from test_synthesis import FED, NEED, SIZE, Noise, blocks, drawn, folder_of, rows_of, synthesise

from fedprior import store
from fedprior.data import table
from fedprior.data.table import Federation
from fedprior.errors import UsageError, UserError
from fedprior.prepare import images, shards, synthesis
from fedprior.prepare.balance import BalanceToMax, FixedBudget
from fedprior.prepare.images import SHARED, Part, Rate, Stream

IMAGES = 27 + 30 + 25


@pytest.fixture
def small(monkeypatch):
    """Blocks of 8 images in calls of 5."""
    monkeypatch.setattr(images, "BLOCK", 8)
    monkeypatch.setattr(images, "CALL", 5)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A function that switches to another cache folder."""

    def switch(name):
        monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / name))
        return tmp_path / name

    return switch


def streams(policy=BalanceToMax()):
    words = synthesis.wording(policy, FED.classes, (), "")
    return synthesis.needs(FED, words, policy, 3).streams


def silent(done, total):
    pass


# Parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [1, 2, 3, 16])
def test_parts_share_out_the_files_and_make_each_image_once(of, small, cache):
    cache("whole")
    synthesise(FED, Noise(), BalanceToMax(), seed=3)
    whole = blocks(folder_of(FED, Noise(), BalanceToMax(), 3).path)
    asked, sizes, told = Counter(), [], []
    for k in range(1, of + 1):
        cache(f"part{k}")
        prior = Noise()
        folder = folder_of(FED, prior, BalanceToMax(), 3)
        made = folder.fill(streams(), lambda done, total: told.append((done, total)), Part(k, of))
        asked.update(prior.asked)
        sizes.append(made)
        assert told[-1] == (made, made)
    assert sum(sizes) == IMAGES
    assert set(asked.values()) == {1}
    files = -(-27 // 8) + -(-30 // 8) + -(-25 // 8)
    assert sum(s > 0 for s in sizes) == min(of, files)
    cache("merged")
    folder = folder_of(FED, Noise(), BalanceToMax(), 3)
    taken = [folder.merge(store.cache_folder().parent / f"part{k}") for k in range(1, of + 1) if sizes[k - 1]]
    assert sum(t.taken for t in taken) == files
    assert blocks(folder.path) == whole
    _, report = synthesise(FED, Noise(), BalanceToMax(), seed=3)
    assert report.generated == 0


def test_a_part_again_makes_nothing_and_a_whole_run_what_faults_left_open(small):
    black = lambda prompt, seed: seed % 7 == 0
    retried = BalanceToMax(attempts=1)
    for _ in range(2):
        made = [folder_of(FED, Noise(black=black), retried, 3).fill(streams(), silent, Part(k, 2)) for k in (1, 2)]
    assert made == [0, 0]
    out, report = synthesise(FED, Noise(black=black), retried, seed=3)
    assert report.faulty > 0
    assert 0 < report.generated < 2 * report.faulty
    assert (out.counts(synthetic=True) == NEED).all()


def test_merging_keeps_what_holds_more_and_refuses_what_is_damaged(small, cache):
    there = cache("there")
    synthesise(FED, Noise(), BalanceToMax(), seed=3)
    other = folder_of(FED, Noise(), BalanceToMax(), 3).path
    files = sorted(other.iterdir())
    data = bytearray(files[0].read_bytes())
    data[len(data) // 3] ^= 1
    files[0].write_bytes(data)
    cache("here")
    folder = folder_of(FED, Noise(), BalanceToMax(), 3)
    folder.fill([Stream(1, SHARED, 11)], silent)  # a full and a half file of class 1
    merged = folder.merge(there)
    assert (merged.damaged, merged.passed) == (1, 1)
    assert merged.taken == len(files) - 2
    assert not (folder.path / files[0].name).exists()
    assert folder.merge(other) == (0, len(files) - 1, 1)  # the folder itself may be named too


def test_merging_other_settings_or_nothing_is_one_clear_line(cache, tmp_path):
    there = cache("there")
    synthesise(FED, Noise(), BalanceToMax(), seed=4)
    cache("here")
    folder = folder_of(FED, Noise(), BalanceToMax(), 3)
    for other in (there, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=f"{other} holds no images of these settings .*ran the same command$"):
            folder.merge(other)


def test_a_cache_that_cannot_be_written_is_one_clear_line(cache):
    there = cache("there")
    synthesise(FED, Noise(), BalanceToMax(), seed=3)
    cache("file").write_text("no folder")
    with pytest.raises(UserError, match=r"cannot write images \(.*set FEDPRIOR_CACHE to a folder with more"):
        folder_of(FED, Noise(), BalanceToMax(), 3).merge(there)
    with pytest.raises(UserError, match=r"cannot write what filters keep \(.*set FEDPRIOR_CACHE to a folder"):
        filtered(Noise(), BalanceToMax(), filters=(Dark(),))


def test_a_file_that_cannot_be_read_for_a_moment_stays_as_it_is(monkeypatch):
    synthesise(FED, Noise(), BalanceToMax(), seed=3)
    folder = folder_of(FED, Noise(), BalanceToMax(), 3)
    before = blocks(folder.path)

    def exhausted(path):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(shards, "read", exhausted)
        assert sum(piece.size for piece in folder.missing(streams(), None)) == IMAGES
    assert blocks(folder.path) == before


# Sudden ends ---------------------------------------------------------------------------------------------


class Slow(Noise):
    """Takes a while, and notes what it made outside the process."""

    def generate(self, prompts, image_seeds, size):
        time.sleep(0.004)
        with open(self.log, "a") as f:
            f.write(f"{len(prompts)}\n")
        return super().generate(prompts, image_seeds, size)


def test_twenty_kills_end_in_the_same_store(small, cache, tmp_path):
    cache("whole")
    synthesise(FED, Noise(), BalanceToMax(), seed=3)
    whole = blocks(folder_of(FED, Noise(), BalanceToMax(), 3).path)
    cache("killed")
    prior = Slow()
    prior.log = tmp_path / "log"
    random.seed(0)
    killed = 0
    while killed < 20:
        child = os.fork()
        if child == 0:
            try:
                synthesise(FED, prior, BalanceToMax(), seed=3)
            finally:
                os._exit(0)
        time.sleep(random.uniform(0.0, 0.04))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status):  # it was done: begin again from the half that is left
            for path in sorted(folder_of(FED, prior, BalanceToMax(), 3).path.iterdir())[::2]:
                path.unlink()
            prior.log.unlink(missing_ok=True)
    out, _ = synthesise(FED, prior, BalanceToMax(), seed=3)
    held = blocks(folder_of(FED, prior, BalanceToMax(), 3).path)
    assert {name: data for name, data in held.items() if not name.startswith(".")} == whole
    assert (out.counts(synthetic=True) == NEED).all()


def test_an_end_loses_at_most_two_calls(small):
    """What a call brought is on its way to the disk when the next but one begins."""
    for stop in range(1, -(-IMAGES // 5)):
        prior, again = Noise(breaks_at=stop), Noise()
        with pytest.raises(KeyboardInterrupt):
            synthesise(FED, prior, BalanceToMax(), seed=stop)
        synthesise(FED, again, BalanceToMax(), seed=stop)
        assert len(prior.asked) + len(again.asked) <= IMAGES + 2 * images.CALL


def test_left_over_temporary_files_go_once_they_are_nobodys(small):
    synthesise(FED, Noise(), BalanceToMax(), seed=3)
    folder = folder_of(FED, Noise(), BalanceToMax(), 3)
    old, new = (folder.path / f".{name}.tmp" for name in ("old", "new"))
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (time.time() - images.STALE - 1,) * 2)
    folder.fill(streams(), silent)
    assert not old.exists()
    assert new.exists()


def test_a_flipped_bit_anywhere_is_found(small):
    synthesise(FED, Noise(), BalanceToMax(), seed=3)
    path = sorted(folder_of(FED, Noise(), BalanceToMax(), 3).path.iterdir())[0]
    sound = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in [*range(8), *range(len(sound) - 8, len(sound)), *rng.integers(0, len(sound), 500).tolist()]:
        data = bytearray(sound)
        data[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        with pytest.raises(ValueError, match="is damaged"):
            shards.read(path)
    path.write_bytes(sound)
    assert shards.read(path).num_rows == 8


# Room and pace -------------------------------------------------------------------------------------------


def test_a_disk_without_room_is_refused_before_an_image_is_made(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    prior = Noise()
    with pytest.raises(UserError, match=r"82 images take about 0 MB, and the disk of .* has 0 MB; free some space"):
        synthesise(FED, prior, BalanceToMax(), seed=3)
    assert prior.calls == []


def test_images_a_second_are_those_made_now(monkeypatch):
    clock = iter([0.0, 10.0, 10.0, 14.0])
    monkeypatch.setattr(images.time, "monotonic", lambda: next(clock))
    rate = Rate()
    assert rate.note(100) == ""  # what was there before says nothing of the pace
    assert rate.note(140) == "10.0 images/s"


# Words and domains ---------------------------------------------------------------------------------------


def with_domains():
    """Client 0 draws (domain 0), client 1 paints (1), client 2 does both, two of three rows painted."""
    counts = [(4, 0, 0), (0, 6, 0), (3, 0, 0)]
    owner = np.repeat([0, 1, 2], [4, 6, 3])
    label = torch.tensor([0] * 4 + [1] * 6 + [0] * 3)
    domain = torch.tensor([0] * 4 + [1] * 6 + [0, 1, 1])
    real = table.make(torch.zeros((13, 3, *SIZE), dtype=torch.uint8), label, domain=domain)
    fed = Federation(
        table=real,
        clients=tuple(torch.from_numpy(np.flatnonzero(owner == k)) for k in range(3)),
        test=real,
        classes=FED.classes,
        domains=("sketch", "art_painting"),
    )
    assert fed.counts().tolist() == [list(row) for row in counts]
    return fed


@pytest.mark.parametrize("pool", ["shared", "per_client"])
def test_a_client_gets_images_of_its_own_domains(pool):
    fed, prior = with_domains(), Noise()
    out, _ = synthesise(fed, prior, BalanceToMax(templates="domain", pool=pool), seed=3)
    assert out.counts().tolist() == [[4] * 3, [6] * 3, [3] * 3]
    for client, expected in enumerate([{0: 8}, {1: 12}, {0: 2, 1: 4}]):  # 3 images a class: largest remainders, 1 and 2
        shard = out.shard(client)
        assert Counter(shard["domain"][shard["synthetic"]].tolist()) == expected
    assert {prompt for prompt, _ in prior.asked if "painting" in prompt} == {
        "an oil painting of a cat", "an oil painting of a lawn mower", "an oil painting of a frog"
    }  # fmt: skip
    need = {"shared": 2 * 4 + 3 * 6 + 1, "per_client": 8 + 12 + 6}[pool]  # cat: painted for client 1 only
    if pool == "per_client":
        assert len(prior.asked) == need
    for path in folder_of(fed, prior, BalanceToMax(templates="domain", pool=pool), 3).path.iterdir():
        for row in rows_of(path):
            assert row["domain"] in ("a black and white pencil sketch", "an oil painting")
            assert row["prompt"].startswith(row["domain"])


def test_templates_that_name_domains_need_data_with_domains():
    with pytest.raises(
        UsageError, match="names a domain, and this split has none; use data with domains and partition=domains"
    ):
        synthesise(FED, Noise(), BalanceToMax(templates="domain"), seed=3)


def test_data_with_domains_and_plain_templates_work_as_before():
    out, _ = synthesise(with_domains(), Noise(), BalanceToMax(), seed=3)
    assert (out.table["domain"][out.table["synthetic"]] == -1).all()


def test_repaired_names_are_asked_for_and_make_a_folder_of_their_own():
    plain, repaired = Noise(), Noise()
    a = synthesise(FED, plain, BalanceToMax(templates="single"), seed=3)[1]
    b = synthesise(FED, repaired, BalanceToMax(templates="single", names="repaired"), seed=3)[1]
    assert a.folders != b.folders
    assert {p for p, _ in plain.asked} == {p for p, _ in repaired.asked}  # nothing here needs repair
    fed = Federation(**{**vars(FED), "classes": ("airplane", "scissors", "frog")})
    prior = Noise()
    synthesise(fed, prior, BalanceToMax(templates="single", names="repaired"), seed=3)
    assert "a photo of an airplane" in {p for p, _ in prior.asked}


def test_a_budget_that_drops_rows_leaves_each_client_as_many_as_it_says():
    out, report = synthesise(FED, Noise(), FixedBudget(budget=12, drop=True), seed=3)
    assert out.counts().sum(1).tolist() == [12, 0, 12, 12]
    assert report.dropped == 35 - (4 + 4) + 33 - (3 + 4) + 8 - 4
    again, _ = synthesise(FED, Noise(), FixedBudget(budget=12, drop=True), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(out.clients, again.clients, strict=True))
    other, _ = synthesise(FED, Noise(), FixedBudget(budget=12, drop=True), seed=4)
    assert not torch.equal(out.clients[0], other.clients[0])


def test_the_server_takes_the_first_images_of_shared_pools():
    policy = BalanceToMax()
    prior = Noise()
    synthesise(FED, prior, policy, seed=3)
    folder = folder_of(FED, prior, policy, 3)
    before = len(prior.asked)
    held = synthesis.server_images(folder, 26)
    assert held["synthetic"].all()
    assert held["label"].bincount().tolist() == [26] * 3
    assert len(prior.asked) - before == 1  # of class 2 there were 25
    with_both = synthesis.with_server(streams(), 3, 26)
    assert [(s.label, s.need) for s in with_both] == [(0, 27), (1, 30), (2, 26)]


# Filters -------------------------------------------------------------------------------------------------


class Dark:
    """Keeps dark images, and counts what it was asked."""

    settings: ClassVar = {"filter": "dark"}
    asked = 0

    def keep(self, images, labels, prompts):
        self.asked += len(images)
        assert len(images) == len(labels) == len(prompts)
        return images.float().mean((1, 2, 3)) < 127


def filtered(prior, policy, **changes):
    folder = replace(folder_of(FED, prior, policy, 3), **changes)
    return synthesis.synthesise(FED, folder, policy)


def test_what_a_filter_removes_stays_in_the_folder_and_others_take_its_place(small):
    prior, dark = Noise(), Dark()
    out, report = filtered(prior, BalanceToMax(), filters=(dark,))
    assert (out.counts(synthetic=True) == NEED).all()
    mine = out.table["image"][out.table["synthetic"]]
    assert (mine.float().mean((1, 2, 3)) < 127).all()
    held = [row for path in report.folders[0].iterdir() for row in rows_of(path)]
    assert len(held) == len(prior.asked) == report.generated + report.removed
    assert all(row["ok"] for row in held)
    assert dark.asked == len(held)
    plain, _ = synthesise(FED, Noise(), BalanceToMax(), seed=3)  # the same folder serves who filters nothing
    assert (plain.counts(synthetic=True) == NEED).all()
    again, prior = Dark(), Noise()
    same_out, second = filtered(prior, BalanceToMax(), filters=(again,))
    assert (second.generated, second.removed, prior.calls) == (0, report.removed, [])
    assert torch.equal(same_out.table["image"], out.table["image"])


def test_a_filter_that_keeps_nothing_is_stopped_in_one_line(small):
    class Never(Dark):
        def keep(self, images, labels, prompts):
            return torch.zeros(len(images), dtype=torch.bool)

    with pytest.raises(
        UserError, match=r"the filter \(dark\) removed \d+ of \d+ images of class '[a-z_]+'; lower its thr"
    ):
        filtered(Noise(), BalanceToMax(), filters=(Never(),))


def test_repeats_count_once_where_images_must_be_distinct(small):
    class Repeating(Noise):
        def image(self, prompt, seed, size=SIZE):
            return super().image("", seed % 40, size)

    out, report = filtered(Repeating(), BalanceToMax(), distinct=True)
    assert report.removed > 0
    for k, row in enumerate(NEED):
        for y, n in enumerate(row):
            assert len(set(drawn(out, k, y))) == n
    again, second = filtered(Noise(breaks_at=0), BalanceToMax(), distinct=True)
    assert (second.generated, second.removed) == (0, report.removed)
    assert torch.equal(again.table["image"], out.table["image"])
