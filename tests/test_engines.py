"""Every method on every engine: whoever runs the clients, the results are those of one client after another."""

import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import toy
from test_methods import VARIANTS, cohort
from torch import nn
from toy import gap

from fedprior import nets, tree
from fedprior.engines import pool, process, vectorised
from fedprior.engines.pool import Pool
from fedprior.engines.process import Desk, transportable
from fedprior.engines.serial import Serial
from fedprior.engines.vectorised import Vectorised
from fedprior.errors import UserError
from fedprior.federate import begin
from fedprior.methods import FedAvg, FedBN, Moon, Scaffold
from fedprior.net import Net
from fedprior.nets.cct import DropPath
from fedprior.optim import SGD, AdamW
from fedprior.schedule import Cosine

LOCAL = {"sgd": SGD(lr=0.05), "adamw": AdamW(lr=1e-3, eps=1e-4)}  # a bias before batch norm has no gradient but noise


@pytest.fixture
def float64(monkeypatch):
    """Nets in double precision, where engines differ by rounding alone."""
    plain = toy.net

    def double(*args, **options):
        made = plain(*args, **options)
        return Net(made.module.double(), made.mean, made.std)

    monkeypatch.setattr(toy, "net", double)


def same(method, engine, bound, **options):
    """Three rounds on both engines: server, its state, what clients remember and what was sent agree."""
    options = {"augment": True, "cohort": cohort(method)} | options
    a, ea, ta = toy.go(method, **options)
    b, eb, tb = toy.go(method, engine=engine, **options)
    assert gap(a.server.weights, b.server.weights) <= bound
    assert gap(a.server.state, b.server.state) <= bound
    assert list(ea.memory) == list(eb.memory)
    assert all(gap(ea.memory.get(k), eb.memory.get(k)) <= bound for k in ea.memory)
    assert a.train_loss == pytest.approx(b.train_loss, rel=max(bound, 1e-12))
    assert ta == tb
    assert (a.accepted, a.partial) == (b.accepted, b.partial)


# Stacked clients


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("method", VARIANTS, ids=repr)
def test_stacked_clients_train_as_one_after_another_does(method, local, float64):
    """Clients of different sizes, so of different numbers of steps, with batch norm and augmentation."""
    if isinstance(method, Scaffold) and method.mode == "sgd" and local != "sgd":
        local = "sgd"  # the only one that it takes
    same(method, Vectorised, 1e-9, optimizer=LOCAL[local])


@pytest.mark.parametrize(
    "options",
    [
        {"bn_stats": "local"},
        {"persist_optimizer": True, "optimizer": AdamW(lr=1e-3, eps=1e-4)},
        {"clip_gradient": 0.1},
        {"straggler_rate": 0.6},
        {"schedule": Cosine(over=4), "straggler_rate": 0.6},
        {"steps": 5, "norm": "gn"},
    ],
    ids=str,
)
@pytest.mark.parametrize("block", [None, 1, 3])
def test_options_of_local_training_hold_in_a_stack_of_any_size(options, block, float64):
    same(Moon(), partial(Vectorised, block=block), 1e-9, **options)


def test_a_block_that_does_not_fit_into_memory_is_halved_until_it_does(monkeypatch, float64):
    sizes, together = [], Vectorised.together

    def scarce(self, down, clients, round):
        sizes.append(len(clients))
        if len(clients) > 2:
            raise torch.OutOfMemoryError
        return together(self, down, clients, round)

    monkeypatch.setattr(Vectorised, "together", scarce)
    same(Scaffold(), Vectorised, 1e-9, cohort=5)
    assert sizes == [5, 3, 2, 2, 1, 2, 2, 1, 2, 2, 1]
    monkeypatch.setattr(
        Vectorised, "together", lambda *given: (_ for _ in ()).throw(torch.OutOfMemoryError("not even one"))
    )
    with pytest.raises(torch.OutOfMemoryError, match="not even one"):
        toy.go(FedAvg(), engine=Vectorised)


def test_a_stacked_step_keeps_to_one_device(monkeypatch):
    """Weights and data on torch's device without memory, where nothing may meet a tensor of the CPU."""
    monkeypatch.setattr(torch, "autocast", lambda *given, **options: nullcontext())
    device = torch.device("meta")
    worker = toy.worker(Scaffold(), optimizer=AdamW(lr=1e-3), steps=2, augment=True)
    engine = Vectorised(replace(worker, net=worker.net.to(device)), toy.federation().to(device))
    start = begin(engine.worker.net, engine.worker.method, 0)
    shared = engine.worker.method.broadcast(start)
    desks = [engine.desk(k, {"weights": start.weights, "shared": shared}, 0) for k in (0, 1)]
    carry, mine = vectorised.stack([d.carry for d in desks]), vectorised.stack([d.ctx.mine for d in desks])
    batch = engine.batch(desks, *vectorised.joined([d.shard for d in desks]), 0)
    carry, losses = engine.step(carry, batch, desks[0].ctx.start, shared, mine, [1.0, 1.0])
    assert {x.device for x in [losses, *tree.flatten(carry).values()] if x.numel()} == {device}


@pytest.mark.parametrize("method", [Scaffold(), FedBN()], ids=repr)
def test_a_compiled_step_is_the_same(method, monkeypatch, float64):
    """As far as torch's tracer goes, without the code that it would generate."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    same(method, partial(Vectorised, compile=True), 1e-9, steps=2, rounds=2, cohort=2)


def drops(rate):
    """CCT with every drop-out and stochastic depth at a rate, for images of its own size."""
    module = nets.build("cct", 4, size=32)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = rate
        if isinstance(part, DropPath):
            part.rate = rate
    return Net(module.double())


def large(monkeypatch):
    """The toy's images at the size that CCT wants."""
    small = toy.images
    monkeypatch.setattr(toy, "images", lambda n, seed=0: (small(n, seed)[0].repeat(1, 1, 4, 4), small(n, seed)[1]))


def test_attention_without_dropout_is_the_same_in_a_stack(monkeypatch):
    large(monkeypatch)
    monkeypatch.setattr(toy, "net", lambda *a, **k: drops(0.0))
    same(FedAvg(), Vectorised, 1e-12, steps=2, rounds=2, cohort=3)


def test_dropout_draws_from_one_stream_a_block_and_so_differs_from_one_after_another(monkeypatch):
    """The one exception: torch's dropout takes its numbers from a single generator for all clients of a program."""
    large(monkeypatch)
    monkeypatch.setattr(toy, "net", lambda *a, **k: drops(0.3))
    run = partial(toy.go, FedAvg(), steps=2, rounds=1, cohort=3)
    a, b, again = (run(engine=e)[0].server.weights for e in (Serial, Vectorised, Vectorised))
    assert gap(b, again) == 0
    assert 1e-6 < gap(a, b) < 0.1
    images = torch.randint(0, 256, (2, 8, 3, 32, 32), dtype=torch.uint8)
    net = drops(0.3).stacked()
    weights = {g: {k: torch.stack([x, x]) for k, x in part.items()} for g, part in net.init().items()}
    twice = torch.func.vmap(lambda w, x: net(w, x).logits, randomness="different")(
        weights, images[:1].expand_as(images)
    )
    assert gap({"x": twice[0]}, {"x": twice[1]}) > 1e-6  # but no two clients get the same numbers


# Processes


class Here(Desk):
    """A worker process without the process: messages are packed and unpacked as on the way to one."""

    def __init__(self, task):
        super().__init__(pickle.loads(pickle.dumps(task)))

    def ask(self, what, *given):
        return pickle.loads(pickle.dumps(getattr(self, what)(*pickle.loads(pickle.dumps(given)))))

    def tell(self, weights):
        self.weights(weights)

    def close(self):
        pass

    def end(self, deadline):
        pass


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(pool, "Process", Here)
    monkeypatch.setattr(process.torch, "set_num_threads", lambda n: None)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("method", VARIANTS, ids=repr)
def test_workers_change_no_bit(method, workers, here):
    """Clients of unequal size begin with the largest; float32, batch norm, augmentation, stragglers."""
    same(method, partial(Pool, workers=workers), 0, straggler_rate=0.3, clip_gradient=5.0)


@pytest.fixture
def real():
    """Engines with real processes, which end with the test."""
    made = []

    def engine(worker, data, memory=None, workers=2):
        made.append(Pool(worker, data, memory, workers=workers))
        return made[-1]

    yield engine
    for one in made:
        one.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_real_processes_change_no_bit_and_judge_alike(workers, real):
    memory = {"persist_optimizer": True, "optimizer": AdamW(lr=1e-3)}
    same(Scaffold(), partial(real, workers=workers), 0, **memory)
    a, ea, _ = toy.go(FedBN())
    b, eb, _ = toy.go(FedBN(), engine=partial(real, workers=workers))
    for k in ea.clients:
        mine, theirs = (e.evaluate(e.start(k, r.server.weights)) for e, r in ((ea, a), (eb, b)))
        assert mine.loss == theirs.loss
        assert np.array_equal(mine.correct, theirs.correct)


def test_a_client_that_fails_in_a_process_fails_here_with_its_name(real):
    engine = real(toy.worker(FedAvg()), toy.federation(), workers=1)
    down = {"weights": engine.worker.net.init(), "shared": {}}
    down["weights"]["params"]["head.bias"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="size") as caught:
        list(engine.train(down, [2], 4))
    assert "in client 2, round 5" in caught.value.__notes__


def test_a_process_that_dies_is_named_with_the_remedy(real):
    engine = real(toy.worker(FedAvg()), toy.federation(), workers=1)
    good = {"weights": engine.worker.net.init(), "shared": {}}
    assert len(list(engine.train(good, [0, 1], 0))) == 2
    os.kill(engine.processes[0].child.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"worker process ended with code -9; if memory ran out, lower workers="):
        list(engine.train(good, [0], 1))


def test_processes_end_when_the_engine_closes_and_can_begin_again(real):
    engine = real(toy.worker(FedAvg()), toy.federation())
    good = {"weights": engine.worker.net.init(), "shared": {}}
    first = list(engine.train(good, [0, 1], 0))
    children = [p.child for p in engine.processes]
    engine.close()
    engine.close()
    assert [c.returncode for c in children] == [0, 0]
    second = list(engine.train(good, [0, 1], 0))
    assert all(gap(a.tree, b.tree) == 0 for a, b in zip(first, second, strict=True))


def test_busy_processes_end_together_when_a_round_is_given_up(real, monkeypatch):
    """Clients of a million steps: whoever closes the engine waits once, not once for each."""
    monkeypatch.setattr(process, "PATIENCE", 0.2)
    engine = real(toy.worker(FedAvg(), steps=10**6), toy.federation(), workers=2)
    good = {"weights": engine.worker.net.init(), "shared": {}}
    engine.begin()
    children = [p.child for p in engine.processes]
    answers = [engine.executor.submit(engine.ask, process.pack(good), "train", k, process.pack({}), 0) for k in (0, 1)]
    time.sleep(0.5)
    engine.close()
    assert [c.returncode for c in children] == [-9, -9]
    assert all(isinstance(a.exception(), UserError) for a in answers)


def test_a_module_beside_the_caller_does_not_stand_in_for_one_of_pythons(real, tmp_path, monkeypatch):
    (tmp_path / "calendar.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    engine = real(toy.worker(FedAvg()), toy.federation(), workers=1)
    assert len(list(engine.train({"weights": engine.worker.net.init(), "shared": {}}, [0, 1], 0))) == 2


def test_no_more_memories_are_at_hand_than_workers_need(here):
    """A cohort of six on one worker: a client's memory is read when one before it is done."""
    seen, engine = [], Pool(toy.worker(FedAvg()), toy.federation(), workers=1)
    ask, gone = engine.ask, []

    def watched(*question):
        gone.append(1)
        return ask(*question)

    get = engine.memory.get
    engine.memory.get = lambda k: (seen.append(len(gone)), get(k))[1]
    engine.ask = watched
    list(engine.train({"weights": engine.worker.net.init(), "shared": {}}, range(6), 0))
    assert len(seen) == 6
    assert all(i - done <= 2 for i, done in enumerate(seen))


def test_a_child_whose_parent_is_gone_ends(tmp_path):
    """A parent that is killed closes no engine; the pipe closes all the same."""
    script = (
        "import sys, time, toy; from fedprior.engines.pool import Pool; from fedprior.methods import FedAvg\n"
        "e = Pool(toy.worker(FedAvg()), toy.federation(), workers=1); e.begin()\n"
        "print(e.processes[0].child.pid, flush=True); time.sleep(60)"
    )
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=os.environ | path)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert not any(tmp_path.iterdir())  # nor do the data stay
    deadline = time.monotonic() + 10
    while (status := Path(f"/proc/{child}/status")).exists() and "zombie" not in status.read_text():
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.05)


@pytest.mark.parametrize("when", ["it answers", "it is told half a question"])
def test_a_child_whose_parent_goes_says_nothing(when):
    child = subprocess.Popen(
        [sys.executable, "-c", "from fedprior.engines.process import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    child.stdout.close()
    if when == "it answers":
        process.write(child.stdin, "weights", b"")  # before it holds anything; its answer will be that this fails
    else:
        whole = pickle.dumps(("weights", bytes(1000)), protocol=5)
        child.stdin.write(len(whole).to_bytes(8, "big") + whole[:500])
    child.stdin.close()
    assert child.stderr.read() == b""
    child.wait()


def test_a_child_leaves_ctrl_c_to_its_parent_from_its_first_import(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(
        "import os, pathlib, signal\n"
        f"pathlib.Path('{tmp_path}/said').write_text(str(signal.getsignal(signal.SIGINT) == signal.SIG_IGN))\n"
        "os._exit(3)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="ended with code 3"):
        process.Process(process.Task(worker=b"", data=tmp_path, federation=None, device="cpu", threads=1))
    assert (tmp_path / "said").read_text() == "True"


def test_what_only_the_running_script_knows_is_refused(monkeypatch):
    class Local(FedAvg):
        pass

    with pytest.raises(UserError, match=r"other processes cannot take this experiment over .*; say engine=serial"):
        Pool(toy.worker(Local()), toy.federation(), workers=1)  # before anything is written
    monkeypatch.setattr(Local, "__module__", "__main__")
    with pytest.raises(UserError, match="Local is defined in the script that runs"):
        pool.portable(toy.worker(Local()))


def test_an_exception_that_cannot_travel_says_the_same():
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(a)

    assert str(transportable(Odd("x", 1))) == "Odd: x"
    known = UserError("plain")
    assert transportable(known) is known
