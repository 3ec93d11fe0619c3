"""Makes the SuperLink know the public keys in its folder, and no longer those that were revoked.

The folder is the truth and the SuperLink's database follows it, so registering twice is nothing, and a database that
was lost is filled again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from . import layout
from .layout import Server


@dataclass
class Changes:
    """What `register` did: names of nodes."""

    registered: list[str] = field(default_factory=list)
    unregistered: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=list)


def register(server: Server) -> Changes:
    """Registers the keys in `nodes/` and unregisters those in `nodes/revoked/` at the running SuperLink.

    Raises UserError where none answers, or for a key that it will not take.
    """
    from flwr.proto.control_pb2 import RegisterNodeRequest, UnregisterNodeRequest

    wanted, revoked = layout.public_keys(server.folder)
    changes = Changes()
    with _superlink(server) as client:
        there = _nodes(client)
        for name, key in revoked.items():
            if key in there and there[key].status != "unregistered":
                client.UnregisterNode(UnregisterNodeRequest(node_id=there[key].node_id))
                changes.unregistered.append(name)
        for name, key in wanted.items():
            if key not in there:
                client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
                changes.registered.append(name)
            elif there[key].status != "unregistered":
                changes.known.append(name)
            else:
                raise UserError(
                    f"the key of {name} was unregistered before, and Flower takes no key twice; make a new one with "
                    f"`fedprior deploy rotate DIR {name}`"
                )
    return changes


def states(server: Server) -> dict[str, str]:
    """What the running SuperLink says of each node in `nodes/`: online, offline, registered (it never connected),
    unregistered or unknown. Raises UserError where no SuperLink answers."""
    wanted, _ = layout.public_keys(server.folder)
    with _superlink(server) as client:
        there = _nodes(client)
    return {name: there[key].status if key in there else "unknown" for name, key in wanted.items()}


@contextmanager
def _superlink(server: Server) -> Iterator[Any]:
    """A client for the commands of administrators, on the SuperLink's own port."""
    import httpx
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor

    try:
        with ControlHttpClient.from_server_address(
            server.control,
            insecure=False,
            root_certificates=(server.folder / "ca.crt").read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        ) as client:
            yield client
    except httpx.HTTPStatusError as error:
        said = error.response.text.strip()[:300] or f"HTTP {error.response.status_code}"
        raise UserError(f"the SuperLink refused: {said}") from None
    except httpx.HTTPError as error:
        raise UserError(
            f"no SuperLink of this deployment answers at {server.control} ({error}); start it first with "
            f"{server.folder / 'start.sh'}"
        ) from None


def _nodes(client: Any) -> dict[bytes, Any]:
    """{public key: what the SuperLink knows of it}"""
    from flwr.proto.control_pb2 import ListNodesRequest

    return {node.public_key: node for node in client.ListNodes(ListNodesRequest()).nodes_info}
