"""`fedprior deploy ...`: folders for a federation over machines, started and checked."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UserError
from .common import Json, emit

app = typer.Typer(help="A federation over machines (Flower): certificates, keys, start, checks.", no_args_is_help=True)

Deployment = Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `fedprior deploy init` wrote.")]
Folder = Annotated[Path, typer.Argument(help="A server's or a node's folder.")]
Nodes = Annotated[int, typer.Option(min=1, max=10_000, help="Nodes, each of which gets a folder.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port of the server that nodes connect to, the proxy's.")]
Days = Annotated[int, typer.Option(min=1, max=3650, help="Days for which the server's certificate is valid.")]


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Within, a file that cannot be written ends in one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write in {folder} ({error}); name a folder of your own") from None


def _needs_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise UserError("this needs Flower; pip install 'fedprior[flower]'")


@app.command("init")
def deploy_init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    nodes: Nodes,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Host name or IP address of the server, the one that nodes use first; may be repeated."),
    ] = None,
    port: Port = 8443,
    superlink_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the SuperLink, on loopback.")] = 8000,
    days: Days = 825,
    as_json: Json = False,
) -> None:
    """Write certificates, keys, settings, a proxy and services for a server and its nodes."""
    _needs_flower()
    from ..deploy import layout

    names = tuple(host or ["localhost"])
    with _writing(folder):
        sites = layout.init(folder, nodes, names, port, superlink_port, days)
    print(f"{folder}/server is for the server, {sites[0].name} to {sites[-1].name} are for one node each.")
    if host is None:
        print("No --host was given, so nodes reach the server only on its own machine.")
    print(f"What to do next, in order: {folder}/README.md. Keep {folder}/ca/ca.key offline.")
    emit({"directory": str(folder), "names": list(names), "nodes": [str(site) for site in sites]}, as_json)


@app.command("add")
def deploy_add(folder: Deployment, nodes: Nodes = 1, as_json: Json = False) -> None:
    """Write folders for further nodes; then `register`."""
    _needs_flower()
    from ..deploy import layout

    with _writing(folder):
        sites = layout.add(folder, nodes)
    print(f"New: {', '.join(site.name for site in sites)}. {_apply(folder)}")
    emit({"nodes": [str(site) for site in sites]}, as_json)


@app.command("rotate")
def deploy_rotate(
    folder: Deployment,
    what: Annotated[str, typer.Argument(help="A node's name, or `server`.")],
    days: Days = 825,
    as_json: Json = False,
) -> None:
    """Make a new key for a node, or a new key and certificate for the server."""
    _needs_flower()
    from ..deploy import layout

    if what == "server":
        with _writing(folder):
            made = layout.rotate_server(folder, days)
        print(f"New: {made}/server.crt and server.key. Bring both to the server, then restart SuperLink and proxy.")
    else:
        with _writing(folder):
            made = layout.rotate_site(folder, what)
        print(f"New: {made}/node.key. Bring it to {what}. {_apply(folder)}")
    emit({"directory": str(made)}, as_json)


@app.command("remove")
def deploy_remove(
    folder: Deployment, node: Annotated[str, typer.Argument(help="A node's name.")], as_json: Json = False
) -> None:
    """Let a node in no more; then `register`."""
    _needs_flower()
    from ..deploy import layout

    with _writing(folder):
        layout.revoke(folder, node)
    print(f"The key of {node} is revoked. {_apply(folder)}")
    emit({"removed": node}, as_json)


def _apply(folder: Path) -> str:
    return f"Bring {folder}/server/nodes to the server and say there: fedprior deploy register server"


@app.command("register")
def deploy_register(
    folder: Annotated[Path, typer.Argument(help="The server's folder.")], as_json: Json = False
) -> None:
    """Tell the running SuperLink which keys may connect: those in nodes/, and no more those in nodes/revoked/."""
    _needs_flower()
    from ..deploy import layout, registry

    server = layout.read(folder)
    if not isinstance(server, layout.Server):
        raise UserError(f"{folder} is a node's folder; keys are registered on the server, from its own folder")
    changes = registry.register(server)
    for verb, names in vars(changes).items():
        if names:
            print(f"{verb if verb != 'known' else 'registered before'}: {', '.join(names)}")
    emit(vars(changes), as_json)


@app.command("start")
def deploy_start(
    folder: Folder,
    proxy: Annotated[
        bool, typer.Option("--i-have-a-proxy", help="A proxy stands before a SuperLink that others reach.")
    ] = False,
) -> None:
    """Run the folder's SuperLink or SuperNode until it is stopped; start.sh calls this."""
    _needs_flower()
    from ..deploy import start

    start.start(folder, proxy)


@app.command("check")
def deploy_check(folder: Folder, as_json: Json = False) -> None:
    """Look at files, keys, certificates, ports, the server, the clock, data and disk."""
    _needs_flower()
    from ..deploy import check

    found = []
    for one in check.run(folder):
        found.append(one)
        print(f"{'ok' if one.ok else 'PROBLEM':8} {one.name}: {one.found}")
        if one.remedy and not one.ok:
            print(f"{'':8} {one.remedy}")
    bad = [one.name for one in found if not one.ok]
    checks = [vars(one) | {"remedy": "" if one.ok else one.remedy} for one in found]
    emit({"ok": not bad, "checks": checks}, as_json)
    if bad:
        raise UserError(f"problems with {', '.join(bad)}; what to do is said above")
