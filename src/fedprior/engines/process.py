"""A client's work in a process of its own: what runs there, and the end of the line in the process that asks.

The two talk over the child's standard input and output, so that nothing depends on the asking script being importable
or on the size of a machine's shared memory. Tensors travel as numpy arrays; the data are a file that all map.
"""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from .. import store, tree
from ..data.table import Federation
from ..errors import UserError
from ..evaluate import read
from ..local import Worker
from ..net import layout
from ..tree import Tree

LENGTH = 8  # bytes that say how long a message is
PATIENCE = 5.0  # seconds that busy processes have to end by themselves
CHILD = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # at once: importing torch takes a while
    "from fedprior.engines.process import main; main()"
)
"""What a child runs. Ctrl-C comes to it too, but who asked decides when to end."""


def pack(value: Tree) -> bytes:
    return pickle.dumps({name: x.detach().cpu().numpy() for name, x in tree.flatten(value).items()}, protocol=5)


def unpack(data: bytes, device: torch.device) -> Tree:
    flat = {name: torch.from_numpy(x).to(device) for name, x in pickle.loads(data).items()}
    return layout(tree.unflatten(flat))


def write(stream: IO[bytes], *message: Any) -> None:
    data = pickle.dumps(message, protocol=5)
    stream.write(len(data).to_bytes(LENGTH, "big") + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message. Raises EOFError when the other end is gone, also in the middle of one."""
    head = stream.read(LENGTH)
    data = stream.read(int.from_bytes(head, "big")) if len(head) == LENGTH else b""
    if not data or len(data) < int.from_bytes(head, "big"):
        raise EOFError
    return pickle.loads(data)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a process is told first. `data` is a file with all columns of a federation, see `save`."""

    worker: bytes  # a pickled Worker, on the CPU
    data: Path
    federation: Federation  # without its tables and rows
    device: str
    threads: int


def save(path: Path, federation: Federation) -> Federation:
    """Writes what is large in a federation to a file -> the rest."""
    rows = {str(k): x for k, x in enumerate(federation.clients)}
    store.write_tree(path, {"table": federation.table, "test": federation.test, "rows": rows})
    return replace(federation, table={}, test={}, clients=())


def load(task: Task) -> Federation:
    """The whole federation; its columns are the mapped file where they are used on a CPU."""
    stored, _ = store.read_tree(task.data, copy=False, check=False)  # written just now by who asks
    rows = tuple(stored["rows"][str(k)] for k in range(len(stored["rows"])))
    whole = replace(task.federation, table=stored["table"], test=stored["test"], clients=rows)
    return whole if task.device == "cpu" else whole.to(torch.device(task.device))


class Process:
    """A child process. One thread at a time may ask it."""

    def __init__(self, task: Task) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
                "OMP_NUM_THREADS": str(task.threads),
                "TRANSFORMERS_VERBOSITY": "error",  # what it says on import was said here already
            },
        )
        self.weights: object = None  # the message of weights that it was sent last
        try:
            self.ask("begin", task)
        except BaseException:
            close([self])
            raise

    def ask(self, *message: Any) -> Any:
        """The answer. Raises what the child raised, and UserError when it died."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        try:
            write(self.child.stdin, *message)
            kind, answer = receive(self.child.stdout)
        except (OSError, EOFError):
            code = self.child.wait()
            raise UserError(
                f"a worker process ended with code {code}; if memory ran out, lower workers= or say engine=serial"
            ) from None
        if kind == "raised":
            raise answer
        return answer

    def tell(self, weights: bytes) -> None:
        """Makes these weights (a packed tree) the ones that questions are about, unless they are already."""
        if self.weights is not weights:
            self.ask("weights", weights)
            self.weights = weights

    def close(self) -> None:
        """No more questions: an idle child ends, a busy one after its answer."""
        assert self.child.stdin is not None
        with suppress(OSError):  # it was gone already
            self.child.stdin.close()

    def end(self, deadline: float) -> None:
        """Waits for the child until the monotonic clock says `deadline`, then kills it."""
        try:
            self.child.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:  # in the middle of a client
            self.child.kill()
            self.child.wait()
        assert self.child.stdout is not None
        self.child.stdout.close()


def close(processes: Sequence[Process]) -> None:
    """Ends them all within `PATIENCE`."""
    for process in processes:
        process.close()
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.end(deadline)


class Desk:
    """What a child process holds."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(task.threads)
        self.device = torch.device(task.device)
        worker: Worker = pickle.loads(task.worker)
        self.worker = replace(worker, net=worker.net.to(self.device))
        self.federation = load(task)
        self.down: Tree = {}

    def weights(self, data: bytes) -> None:
        self.down = unpack(data, self.device)

    def train(self, client: int, memory: bytes, round: int) -> tuple[Any, bytes, bytes]:
        """-> (the upload without its tree, its tree, memory)"""
        shard = self.federation.shard(client)
        upload, after = self.worker.train(client, shard, self.down, unpack(memory, self.device), round)
        return upload._replace(tree={}), pack(upload.tree), pack(after)

    def evaluate(self, first: int, last: int) -> tuple[Any, list[float]]:
        """Which of these test images are recognised, and the loss of each batch."""
        part = {name: column[first:last] for name, column in self.federation.test.items()}
        hits, losses = read(self.worker.net, self.down, part)
        return hits.cpu().numpy(), losses


def main() -> None:
    """The child: answers one question after another until nobody asks."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not stand between answers
    questions = sys.stdin.buffer
    desk: Desk | None = None
    while True:
        try:
            what, *given = receive(questions)
        except EOFError:
            return
        try:
            if what == "begin":
                desk, answer = Desk(*given), None
            else:
                answer = getattr(desk, what)(*given)
        except Exception as error:
            answer, what = transportable(error), "raised"
        try:
            write(answers, what, answer)
        except BrokenPipeError:  # nobody listens; and at once, since closing what holds the answer would fail again
            os._exit(1)


def transportable(error: Exception) -> Exception:
    """The exception itself where it can travel, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
