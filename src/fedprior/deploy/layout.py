"""What lies where in the folders of a deployment, and who writes it.

DIR/ca/        the authority; its key signs server certificates and is kept offline
DIR/server/    for the machine of the SuperLink; nodes/ holds the public keys that may connect
DIR/site-0/    for the machine of node 0, and so on: its private key and its settings
"""

import ipaddress
import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import store
from ..errors import UsageError, UserError, unknown
from . import certificates
from .certificates import Pair

CONNECTION = "fedprior"  # the SuperLink's name in Flower's own config.toml
PLACE = "/srv/fedprior"  # where service files and the proxy's include expect the folders
BODY_MB = 32  # largest request that the proxy takes; Flower cuts arrays in pieces of 5 MB
SITE = re.compile(r"site-(\d+)")
LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")

# What a SuperNode with a registered key asks for; everything else on the SuperLink's port is for administrators.
FLEET = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)


@dataclass(frozen=True)
class Server:
    """A server's `deploy.toml`. The SuperLink listens on (host, port), its proxy on `public_port`, under `names`."""

    folder: Path
    host: str
    port: int
    public_port: int
    names: tuple[str, ...]
    proxy_acknowledged: bool = False

    @property
    def control(self) -> str:
        """Where administrators on this machine reach the SuperLink, as HOST:PORT."""
        return address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host), self.port)


@dataclass(frozen=True)
class Node:
    """A node's `deploy.toml`: its name and the server's address as HOST:PORT."""

    folder: Path
    name: str
    superlink: str


def init(
    folder: Path, nodes: int, names: tuple[str, ...], port: int = 8443, superlink_port: int = 8000, days: int = 825
) -> list[Path]:
    """Writes all folders of a new deployment. -> the nodes' folders.

    `names` are the host names and IP addresses under which nodes reach the server, the first of them the one that they
    use. Raises UsageError for a name or port that cannot be one, UserError where `folder` has content.
    """
    names = tuple(map(host_name, names))
    if port == superlink_port:
        raise UsageError(f"--port and --superlink-port are both {port}; the proxy and the SuperLink need one each")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty; choose a new folder, or use `fedprior deploy add` and `rotate`")
    signer = certificates.authority()
    _folder(folder / "ca")
    _secret(folder / "ca" / "ca.key", signer.key)
    store.write_text(folder / "ca" / "ca.crt", signer.certificate.decode())
    server = _folder(folder / "server")
    store.write_text(server / "ca.crt", signer.certificate.decode())
    _write_pair(server, certificates.server(signer, names, days))
    _folder(server / "nodes")
    values: dict[str, Any] = {"names": names, "port": superlink_port, "public_port": port}
    for name in ("deploy.toml", "nginx.conf"):
        _render(server / name, f"server-{name}", **values, root="")
    _render(server / "nginx" / "include.conf", "include.conf", **values, root=f"{PLACE}/server/")
    _render(server / "start.sh", "start.sh", mode=0o755)
    for name in ("superlink", "proxy"):
        _render(server / "systemd" / f"fedprior-{name}.service", f"{name}.service", folder="server")
    connection(server_of(folder))
    _render(folder / "README.md", "README.md", **values, address=address(names[0], port), days=days)
    return add(folder, nodes)


def add(folder: Path, nodes: int) -> list[Path]:
    """Writes the folders of further nodes, numbered on, and puts their public keys into `server/nodes`."""
    server = server_of(folder)
    known = [*folder.iterdir(), *_public_keys(server.folder / "nodes"), *_public_keys(revoked(server.folder))]
    taken = [int(found[1]) for path in known if (found := SITE.match(path.name))]
    first = max(taken, default=-1) + 1
    made = []
    for number in range(first, first + nodes):
        name = f"site-{number}"
        site = _folder(folder / name)
        values: dict[str, Any] = {
            "name": name,
            "number": number,
            "superlink": address(server.names[0], server.public_port),
        }
        _new_key(folder, name)
        store.write_text(site / "ca.crt", (server.folder / "ca.crt").read_text())
        _render(site / "deploy.toml", "node-deploy.toml", **values)
        _render(site / "node.toml", "node.toml", **values)
        _render(site / "start.sh", "start.sh", mode=0o755)
        _render(site / "systemd" / f"fedprior-{name}.service", "node.service", folder=name)
        made.append(site)
    return made


def rotate_site(folder: Path, name: str) -> Path:
    """A new key for a node; `register` then lets it in and the old one no more. -> the folder that holds it."""
    revoke(folder, name)
    _new_key(folder, name)
    return folder / name


def rotate_server(folder: Path, days: int = 825) -> Path:
    """A new key and certificate for the server, for the names in its `deploy.toml`. -> the server's folder."""
    server = server_of(folder)
    try:
        signer = Pair((folder / "ca" / "ca.crt").read_bytes(), (folder / "ca" / "ca.key").read_bytes())
    except OSError as error:
        raise UserError(f"the authority is not there ({error}); bring {folder / 'ca'} back to sign with it") from None
    _write_pair(server.folder, certificates.server(signer, server.names, days))
    return server.folder


def revoke(folder: Path, name: str) -> None:
    """Puts a node's public key among those that `register` removes."""
    server = server_of(folder)
    key = server.folder / "nodes" / f"{name}.pub"
    if not key.is_file():
        raise unknown("node", name, [path.stem for path in _public_keys(key.parent)])
    _folder(revoked(server.folder))
    key.replace(revoked(server.folder) / f"{name}.{store.digest(key.read_bytes())[:12]}.pub")


def public_keys(server: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """-> (keys that may connect, keys that may no more), each {name: key as the SuperLink knows it}.

    Raises UserError for a file that is no public key.
    """
    return _load_keys(server / "nodes"), _load_keys(revoked(server))


def revoked(server: Path) -> Path:
    return server / "nodes" / "revoked"


def server_of(folder: Path) -> Server:
    """The server of a deployment's folder."""
    if not (folder / "server").is_dir():
        raise UserError(f"{folder} holds no deployment (no {folder / 'server'}); make one with `fedprior deploy init`")
    found = read(folder / "server")
    if not isinstance(found, Server):
        raise UserError(f'{folder / "server" / "deploy.toml"} does not say role = "server"')
    return found


def read(folder: Path) -> Server | Node:
    """What a folder's `deploy.toml` says. Raises UserError where there is none, UsageError for what it cannot mean."""
    path = folder / "deploy.toml"
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        more = f"; did you mean {folder / 'server'}?" if (folder / "server").is_dir() else ""
        raise UserError(f"there is no {path}{more or '; name a folder that `fedprior deploy init` wrote'}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    role = found.pop("role", None)
    if role == "server":
        names = _take(path, found, "names", list)
        settings: Server | Node = Server(
            folder=folder,
            host=_take(path, found, "host", str),
            port=_port(path, found, "port"),
            public_port=_port(path, found, "public_port"),
            names=tuple(host_name(name) for name in names),
            proxy_acknowledged=_take(path, found, "proxy_acknowledged", bool, False),
        )
        if not names:
            raise UsageError(f"{path}: names must hold at least one host name")
    elif role == "node":
        name, superlink = _take(path, found, "name", str), _take(path, found, "superlink", str)
        split_address(superlink)
        settings = Node(folder, name, superlink)
    else:
        raise UsageError(f'{path}: role must be "server" or "node"')
    if found:
        raise unknown(f"key in {path}:", next(iter(found)), type(settings).__dataclass_fields__)
    return settings


def connection(server: Server) -> None:
    """Writes Flower's own `config.toml`, in which paths must be absolute, for where the folder lies now."""
    authority = json.dumps(str((server.folder / "ca.crt").resolve()))
    text = (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{server.control}"\n'
        f"root-certificates = {authority}\n"
    )
    path = server.folder / "flwr" / "config.toml"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        _folder(path.parent)
        store.write_text(path, text)


def address(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(text: str) -> tuple[str, int]:
    """The two parts of HOST:PORT. Raises UsageError for anything else."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"'{text}' is no HOST:PORT")
    return host_name(host.removeprefix("[").removesuffix("]")), int(port)


def host_name(text: Any) -> str:
    """The text if it is a host name or an IP address. Raises UsageError for anything else."""
    name = text if isinstance(text, str) else ""  # ip_address takes numbers too
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if len(name) > 253 or not all(LABEL.fullmatch(label) for label in name.split(".")):
            hint = "neither https:// nor a port belongs to it"
            raise UsageError(f"'{text}' is no host name or IP address; {hint}") from None
    return name


def loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _new_key(folder: Path, name: str) -> None:
    private, public = certificates.node_key(name)
    _secret(_folder(folder / name) / "node.key", private)
    store.write_text(folder / "server" / "nodes" / f"{name}.pub", public.decode())


def _write_pair(server: Path, pair: Pair) -> None:
    _secret(server / "server.key", pair.key)
    store.write_text(server / "server.crt", pair.certificate.decode())


def _secret(path: Path, data: bytes) -> None:
    store.write_text(path, data.decode(), mode=0o600)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def _public_keys(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pub"))


def _load_keys(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in _public_keys(folder):
        try:
            found[path.stem] = certificates.public_pem(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is no public key ({error}); `fedprior deploy rotate` makes a new one") from None
    return found


def _render(path: Path, template: str, mode: int = 0o644, **values: Any) -> None:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    engine = Environment(
        loader=PackageLoader("fedprior.deploy"),
        autoescape=False,  # configuration and shell, no HTML; `host_name` lets nothing else in
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = engine.get_template(f"{template}.j2").render(
        **values, place=PLACE, fleet="|".join(FLEET), body_MB=BODY_MB, connection=CONNECTION
    )
    store.write_text(path, text, mode)


def _take(path: Path, found: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = found.pop(key, default)
    if type(value) is not kind:
        names: dict[Iterable[str] | type, str] = {
            str: "a string",
            int: "a number",
            bool: "true or false",
            list: "a list",
        }
        raise UsageError(f"{path}: {key} must be {names[kind]}" + ("; it is missing" if value is None else ""))
    return value


def _port(path: Path, found: dict[str, Any], key: str) -> int:
    value: int = _take(path, found, key, int)
    if not 0 < value < 65536:
        raise UsageError(f"{path}: {key} must lie between 1 and 65535")
    return value
