"""Clients in worker processes of one machine: the results of `Serial`, to the bit, in less time."""

import pickle
import queue
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.table import Federation
from ..errors import UserError
from ..evaluate import Evaluation, batches, check, summed
from ..local import Worker
from ..memory import ClientMemory
from ..tree import Tree
from ..uploads import Upload
from .process import Process, Task, close, pack, save, unpack
from .serial import Serial


class Pool(Serial):
    """`workers` processes, which live as long as the engine, each with `threads` threads and one of the `devices`.

    The client with the most steps goes first; uploads come in the order of ids whatever ends first. Up to a cohort of
    answers is held meanwhile. Raises UserError for a worker that other processes cannot take over.
    """

    def __init__(
        self,
        worker: Worker,
        federation: Federation,
        memory: ClientMemory | None = None,
        *,
        workers: int,
        threads: int = 1,
        devices: Sequence[str] = ("cpu",),
    ) -> None:
        super().__init__(worker, federation, memory)
        self.workers, self.threads, self.devices = workers, threads, devices
        self.packed = portable(worker)  # at once, so that what cannot travel shows before anything is written
        self.executor: ThreadPoolExecutor | None = None
        self.idle: queue.SimpleQueue[Process] = queue.SimpleQueue()
        self.processes: list[Process] = []

    def begin(self) -> ThreadPoolExecutor:
        """Starts the processes, all at once, unless they run already."""
        if self.executor is not None:
            return self.executor
        self.executor = ThreadPoolExecutor(self.workers)
        try:
            with tempfile.TemporaryDirectory(prefix="fedprior-", ignore_cleanup_errors=True) as folder:
                path = Path(folder) / "federation.safetensors"
                rest = save(path, self.federation)
                started = [self.executor.submit(self.hire, path, rest, i) for i in range(self.workers)]
                wait(started)  # what they have mapped outlives the file, wherever files can be removed while open
            for future in started:
                future.result()
        except BaseException:
            self.close()
            raise
        return self.executor

    def hire(self, data: Path, rest: Federation, i: int) -> None:
        device = self.devices[i % len(self.devices)]
        task = Task(worker=self.packed, data=data, federation=rest, device=device, threads=self.threads)
        self.processes.append(process := Process(task))
        self.idle.put(process)

    def ask(self, weights: bytes, *question: Any) -> Any:
        """An idle process's answer to a question about these weights."""
        process = self.idle.get()
        try:
            process.tell(weights)
            return process.ask(*question)
        finally:
            self.idle.put(process)

    def train(self, down: Tree, cohort: Sequence[int], round: int) -> Iterable[Upload]:
        executor, weights = self.begin(), pack(down)
        steps = {k: self.worker.work(len(self.federation.clients[k]), round, k) for k in cohort}
        waiting = sorted(cohort, key=lambda k: (steps[k], -k))  # the largest goes first, from the end
        answers: dict[int, Future[Any]] = {}

        def hand_out() -> None:
            """Keeps every process busy, and no more memories at hand than that takes."""
            while waiting and sum(not answer.done() for answer in answers.values()) < 2 * self.workers:
                client = waiting.pop()
                memory = pack(self.memory.get(client))
                answers[client] = executor.submit(self.ask, weights, "train", client, memory, round)

        try:
            for client in sorted(cohort):
                hand_out()
                while client not in answers or not answers[client].done():
                    wait([a for a in answers.values() if not a.done()], return_when=FIRST_COMPLETED)
                    hand_out()
                try:
                    upload, sent, kept = answers.pop(client).result()
                except Exception as error:
                    error.add_note(f"in client {client}, round {round + 1}")
                    raise
                self.remember(round, client, unpack(kept, self.worker.net.device))
                yield upload._replace(tree=unpack(sent, self.worker.net.device))
        finally:
            for answer in answers.values():
                answer.cancel()

    def evaluate(self, weights: Tree) -> Evaluation:
        check(self.federation.test)
        executor, packed = self.begin(), pack(weights)
        parts = batches(self.federation.test, self.workers)
        answers = list(executor.map(partial(self.ask, packed, "evaluate"), *zip(*parts, strict=True)))
        hits = torch.from_numpy(np.concatenate([a for a, _ in answers])).to(self.worker.net.device)
        return summed(self.federation.test, hits, [x for _, own in answers for x in own], len(self.federation.classes))

    def close(self) -> None:
        """Ends the processes, also those that are just starting."""
        if self.executor is None:
            return
        self.executor.shutdown(wait=False, cancel_futures=True)
        close(self.processes)
        self.executor.shutdown()
        close(self.processes)  # those that started meanwhile
        self.executor, self.processes, self.idle = None, [], queue.SimpleQueue()


def portable(worker: Worker) -> bytes:
    """A worker as bytes that another process can make sense of. Raises UserError for one that no other can."""
    guide = worker.guide.settled() if worker.guide is not None else None
    for part in (worker.method, worker.optimizer, worker.net.module):
        if type(part).__module__ == "__main__":
            raise UserError(
                f"{type(part).__name__} is defined in the script that runs, where other processes cannot find it; move "
                "it to a module of its own, or say engine=serial"
            )
    try:
        return pickle.dumps(replace(worker, net=worker.net.to(torch.device("cpu")), guide=guide), protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(f"other processes cannot take this experiment over ({error}); say engine=serial") from None
