"""Looks for what keeps a server's or a node's folder from working, before anybody waits for it."""

import http.client
import importlib.metadata
import os
import shutil
import ssl
import stat
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from .. import __version__
from ..errors import UserError
from . import certificates, layout, registry, start
from .layout import Node, Server

SOON = 14  # days before the end of a certificate when that is a problem
AHEAD, BEHIND = 4.0, 295.0  # seconds that a node's clock may differ; Flower takes signatures from -5 to 305 s of age
LEAST_GB = 2.0  # free disk
TIMEOUT = 10.0  # seconds for an answer of the server
CONTROL = ("/v1/control/list-runs", "/v1/runtime/acquire-task")  # one of each kind that must be closed to nodes
SERVER_FILES = ("ca.crt", "server.crt", "server.key", "nginx.conf", "start.sh")
NODE_FILES = ("ca.crt", "node.key", "node.toml", "start.sh")


@dataclass(frozen=True)
class Check:
    """One thing looked at: whether it is well, what was found, and what to do about it where it is not (unless `found`
    says it already)."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def run(folder: Path) -> Iterator[Check]:
    """All checks of a folder, one after another. Raises what `layout.read` raises."""
    settings = layout.read(folder)
    checks = SERVER if isinstance(settings, Server) else NODE
    for name, check in checks.items():
        try:
            yield from check(settings)
        except UserError as error:
            yield Check(name, False, str(error))
        except (OSError, ValueError) as error:
            yield Check(name, False, str(error), "bring the file from where `fedprior deploy init` wrote it")


def _files(settings: Server | Node) -> Iterator[Check]:
    files = SERVER_FILES if isinstance(settings, Server) else NODE_FILES
    missing = [name for name in files if not (settings.folder / name).is_file()]
    yield Check(
        "files",
        not missing,
        f"missing: {', '.join(missing)}" if missing else "all there",
        "copy the whole folder again from where `fedprior deploy init` wrote it",
    )
    for name in ("server.key", "node.key", "ca.key"):
        path = settings.folder / name
        if path.is_file():
            mode = stat.S_IMODE(path.stat().st_mode)
            yield Check(f"{name} private", not mode & 0o077, f"mode {mode:o}", f"others may read it; chmod 600 {path}")


def _certificate(settings: Server | Node) -> Iterator[Check]:
    folder = settings.folder
    days = certificates.days_left(folder / "ca.crt")
    yield Check("authority", days > SOON, _valid(days), "make a new deployment; this authority ends")
    if isinstance(settings, Server):
        rotate = "`fedprior deploy rotate DIR server`, where the authority lies"
        facts = certificates.facts(folder / "server.crt", folder / "server.key", folder / "ca.crt")
        yield Check("certificate", facts.days > SOON, _valid(facts.days), rotate)
        yield Check(
            "certificate's authority", facts.issued_by, "ca.crt signed it" if facts.issued_by else "not ca.crt", rotate
        )
        yield Check(
            "key pair", facts.belongs, "they belong together" if facts.belongs else "another key's certificate", rotate
        )
        lacking = [name for name in settings.names if name not in facts.names]
        yield Check(
            "names",
            not lacking,
            f"not in the certificate: {', '.join(lacking)}" if lacking else f"good for {', '.join(facts.names)}",
            f"correct names in deploy.toml, or {rotate}",
        )


def _valid(days: float) -> str:
    return f"valid for {days:.0f} days" if days >= 0 else f"expired {-days:.0f} days ago"


def _node_keys(settings: Server | Node) -> Iterator[Check]:
    if isinstance(settings, Node):
        certificates.load_key((settings.folder / "node.key").read_bytes())
        yield Check("key", True, "readable by Flower")
    else:
        wanted, revoked = layout.public_keys(settings.folder)
        none = "copy nodes/ from where `fedprior deploy init` wrote it"
        yield Check("keys of nodes", bool(wanted), f"{len(wanted)}, and {len(revoked)} revoked", none)


def _versions(settings: Server | Node) -> Iterator[Check]:
    flower = importlib.metadata.version("flwr")
    found = f"fedprior {__version__}, flwr {flower}, torch {importlib.metadata.version('torch')}"
    yield Check("versions", flower.startswith("1.42."), found, "pip install 'fedprior[flower]' (Flower 1.42)")
    start.executable("flower-superlink" if isinstance(settings, Server) else "flower-supernode")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        if os.environ.get(name):
            yield Check("proxy variable", True, f"Flower goes through {name}={os.environ[name]}; these checks do not")


def _ports(settings: Server | Node) -> Iterator[Check]:
    """The server's ports: free, or answered by this deployment; and what the proxy lets through."""
    assert isinstance(settings, Server)
    start.program_of(settings)  # refuses another host than loopback
    yield Check("host", True, settings.host if layout.loopback(settings.host) else f"{settings.host}, behind a proxy")
    for name, host, port in (
        ("SuperLink", *layout.split_address(settings.control)),
        ("proxy", "localhost", settings.public_port),
    ):
        try:
            answer = _ask(settings.folder / "ca.crt", host, port, "GET", "/health")
        except ConnectionRefusedError:
            yield Check(name, True, f"not running; port {port} is free")
            continue
        except (OSError, http.client.HTTPException) as error:
            other = (
                "stop what listens there, or change the port in deploy.toml and nginx.conf; after a rotation restart"
            )
            yield Check(name, False, f"port {port} is taken by something else ({error})", other)
            continue
        yield Check(name, answer.status == 200, f"answers on port {port}", _behind(answer.status))
        if name == "proxy":
            yield from _closed(settings.folder / "ca.crt", host, port)
        elif answer.status == 200:
            states = registry.states(settings)
            strange = [node for node, state in states.items() if state in ("unknown", "unregistered")]
            said = ", ".join(f"{node} {state}" for node, state in states.items())
            yield Check("nodes", not strange, said, "`fedprior deploy register .` makes the SuperLink know their keys")


def _server(settings: Server | Node) -> Iterator[Check]:
    """What a node sees of the server."""
    assert isinstance(settings, Node)
    host, port = layout.split_address(settings.superlink)
    authority = settings.folder / "ca.crt"
    try:
        answer = _ask(authority, host, port, "GET", "/health")
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message
        yield Check("server", False, f"{settings.superlink} is not trusted: {why}", _trust(why))
        return
    except (OSError, http.client.HTTPException) as error:
        remedy = "start the server and its proxy, open the port, or correct superlink in deploy.toml"
        yield Check("server", False, f"{settings.superlink} does not answer: {error}", remedy)
        return
    found = f"{settings.superlink} answers, its certificate is good"
    yield Check("server", answer.status == 200, found, _behind(answer.status))
    yield clock(answer.ahead)
    yield from _closed(authority, host, port)


def clock(ahead: float | None) -> Check:
    """The verdict on a node's clock that is `ahead` seconds before the server's; None where the server did not say."""
    if ahead is None:
        return Check("clock", True, "the server did not say its time")
    found = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    remedy = "Flower refuses nodes that are more than 5 s ahead or 5 minutes behind; set the clock (NTP)"
    return Check("clock", -BEHIND < ahead < AHEAD, found, remedy)


@dataclass(frozen=True)
class _Answer:
    status: int
    ahead: float | None  # seconds that this machine's clock is ahead of the server's


def _ask(authority: Path, host: str, port: int, method: str, path: str) -> _Answer:
    """A verified request. Raises OSError (of which TLS errors are) and http.client.HTTPException."""
    context = ssl.create_default_context(cafile=str(authority))
    with closing(http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=context)) as connection:
        began = time.time()
        connection.request(method, path, body=b"" if method == "POST" else None)
        response = connection.getresponse()
        response.read()
        middle = (began + time.time()) / 2
    try:
        said: datetime | None = parsedate_to_datetime(response.getheader("Date", ""))
    except ValueError:
        said = None
    return _Answer(response.status, None if said is None else middle - (said.timestamp() + 0.5))  # whole seconds


def _closed(authority: Path, host: str, port: int) -> Iterator[Check]:
    """Whether those who reach a port from outside are kept from the commands of administrators."""
    for path in CONTROL:
        status = _ask(authority, host, port, "POST", path).status
        yield Check(
            f"{path.split('/')[2]} closed",
            status == 403,
            f"{path} answers {status}",
            "WHOEVER REACHES THIS PORT CAN SUBMIT CODE THAT ALL NODES RUN; close it now and pass only /v1/fleet/, as "
            "the server's nginx.conf does",
        )


def _behind(status: int) -> str:
    return f"the proxy answers {status}, the SuperLink behind it does not; start it on the server"


def _trust(why: str) -> str:
    if "expired" in why:
        return "the server needs a new certificate (`fedprior deploy rotate DIR server`), or this clock is wrong"
    if "match" in why:
        return "the certificate is for other names; correct superlink in deploy.toml, or names on the server and rotate"
    return "this is not the server that ca.crt belongs to; ask its people, and do not go on"


def _own(settings: Server | Node) -> Iterator[Check]:
    """What a node has of its own: settings, device, data, prior."""
    from .. import environment
    from ..data import origins
    from ..node_settings import Settings

    path = settings.folder / "node.toml"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no TOML: {error}; correct that line") from None
    mine = Settings.read(values)
    yield Check("node.toml", True, f"{mine.name}, clients {', '.join(map(str, mine.clients))}")
    looks: dict[str, Callable[[], str]] = {"device": lambda: str(environment.device(mine.device or "auto"))}
    if (data := mine.data) is not None:
        there = settings.folder / Path(data).expanduser()
        looks["data"] = lambda: f"{origins.roles(origins.local(there))[0]} in {there}"
    if (prior := mine.prior) is not None:
        looks["prior"] = lambda: _prior(settings.folder, prior)
    for name, look in looks.items():
        try:
            yield Check(name, True, look())
        except UserError as error:
            yield Check(name, False, str(error), "correct node.toml")
    yield _writable("state", settings.folder / mine.state)


def _prior(folder: Path, name: str) -> str:
    """Where a prior lies. Raises UserError where it is not on this disk."""
    from ..priors import embedded, locate

    if name in embedded.names():
        return f"{name}, which ships with fedprior"
    here = folder / Path(name).expanduser()
    source: str | Path = here if here.exists() else locate.ALIASES.get(name, name)
    return str(locate.find(source, offline=True).folder)


def _disk(settings: Server | Node) -> Iterator[Check]:
    free = shutil.disk_usage(settings.folder).free / 1e9
    yield Check("disk", free >= LEAST_GB, f"{free:.1f} GB free", f"make room; at least {LEAST_GB:g} GB")
    yield _writable("folder", settings.folder)


def _writable(name: str, path: Path) -> Check:
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    ok = there.is_dir() and os.access(there, os.W_OK)
    return Check(f"{name} writable", ok, str(path), f"this user cannot write in {there}; change its owner")


Checks = dict[str, Callable[[Server | Node], Iterator[Check]]]
SHARED: Checks = {
    "files": _files,
    "certificate": _certificate,
    "keys": _node_keys,
    "versions": _versions,
    "disk": _disk,
}
SERVER: Checks = {**SHARED, "ports": _ports}
NODE: Checks = {**SHARED, "node": _own, "server": _server}
