"""What the people at a site say of their node, in its configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import UsageError, unknown

DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the people at a site say of their node. `data` is the site's own data, or in a simulation a local copy of
    the experiment's; `prior` and `device` stand in for the experiment's."""

    name: str
    clients: tuple[int, ...]
    state: Path
    data: str | None = None
    image: str | None = None  # columns of `data`, as data.image and data.label
    label: str | None = None
    classes: str = ""  # a file with lines `the site's class name = the experiment's`
    prior: str | None = None
    device: str | None = None
    share_label_counts: bool = False

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Settings":
        """From a node's configuration: `clients` such as "0-24,30", `state-dir`, and optionally the others, with - or _
        between words. Raises UsageError for what is missing or unknown."""
        given = {str(key).replace("-", "_"): value for key, value in values.items()}
        state = given.pop("state_dir", None)
        known = ("name", "clients", "data", "image", "label", "classes", "prior", "device", "share_label_counts")
        for key in given:
            if key not in known:
                raise unknown("key of the node's configuration", key, (*known, "state_dir"))
        if "clients" not in given or not state:
            raise UsageError('a node\'s configuration needs clients="0" (or "0-24") and state-dir="FOLDER"')
        clients = numbers(str(given.pop("clients")))
        shared = given.pop("share_label_counts", False)
        if not isinstance(shared, bool):
            raise UsageError(f"share-label-counts must be true or false, not {shared}")
        texts = {key: str(value) for key, value in given.items() if value != ""}
        if texts.get("device", "auto") not in get_args(DeviceName):
            raise unknown("device", texts["device"], get_args(DeviceName))
        name = texts.pop("name", "") or f"clients-{'-'.join(map(str, (clients[0], clients[-1])))}"
        return cls(name=name, clients=clients, state=Path(str(state)).expanduser(), share_label_counts=shared, **texts)


def numbers(text: str) -> tuple[int, ...]:
    """ "0-2,5" -> (0, 1, 2, 5). Raises UsageError for anything else."""
    out: list[int] = []
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(max(first, last, key=len)) > 7:
            raise UsageError(f'clients="{text}" must be numbers such as "0-24" or "0,3,5"')
        out += range(int(first), int(last or first) + 1)
    if not out or len(set(out)) != len(out):
        raise UsageError(f'clients="{text}" names {"no client" if not out else "a client twice"}')
    return tuple(sorted(out))
