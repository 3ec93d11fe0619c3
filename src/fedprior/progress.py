"""What a person sees while something takes long: a bar on a terminal, plain lines elsewhere. All on stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

Update = Callable[[int, str], None]  # (done so far, a note such as the current accuracy)
LONGEST = 500  # letters of a text that somebody else wrote


class Progress(Protocol):
    def say(self, text: str) -> None:
        """One line that stays."""
        ...

    @contextmanager
    def task(self, name: str, total: int, done: int = 0) -> Iterator[Update]:
        """Something that takes `total` units, `done` of which were there before."""
        ...


class Silent:
    """Says nothing."""

    def say(self, text: str) -> None:
        pass

    @contextmanager
    def task(self, name: str, total: int, done: int = 0) -> Iterator[Update]:
        yield lambda done, note: None


class Lines:
    """A line every few seconds, for logs and pipes."""

    def __init__(self, out: TextIO, interval: float = 5.0) -> None:
        self.out, self.interval = out, interval

    def say(self, text: str) -> None:
        print(text, file=self.out, flush=True)

    @contextmanager
    def task(self, name: str, total: int, done: int = 0) -> Iterator[Update]:
        began, last, before = time.monotonic(), time.monotonic(), done

        def update(done: int, note: str) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= self.interval or done == total:
                last = now
                left = (now - began) / max(done - before, 1) * (total - done)
                tail = f"{clock(left)} left" if done < total else f"in {clock(now - began)}"
                self.say(", ".join(part for part in (f"{name}: {done}/{total}", note, tail) if part))

        yield update


class Bars:
    """A live bar with the time left."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    @contextmanager
    def task(self, name: str, total: int, done: int = 0) -> Iterator[Update]:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Live

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Live(*columns, console=self.console) as live:
            bar = live.add_task(name, total=total, completed=done, note="")
            yield lambda done, note: live.update(bar, completed=done, note=note)


def for_terminal() -> Progress:
    """Bars where stderr is a terminal, lines where it is not."""
    return Bars() if sys.stderr.isatty() else Lines(sys.stderr)


def clock(seconds: float) -> str:
    """42 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def clean(text: object, most: int = LONGEST) -> str:
    """What somebody else wrote, such as a node or whoever named a file, as one line of bounded length that can be
    printed anywhere."""
    plain = "".join(c if c.isprintable() else " " for c in str(text)[: 4 * most])
    line = " ".join(plain.encode("utf-8", "replace").decode("utf-8").split())
    return line if len(line) <= most else f"{line[:most]}..."
