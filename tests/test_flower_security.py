"""Who is let in: real processes of Flower, over TLS, on loopback."""

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import sys
import time

import psutil
import pytest
from cluster import Cluster, fedprior

from fedprior.deploy import certificates, check, layout, start

pytestmark = pytest.mark.flower

PYPROJECT = """
[project]
name = "asks"
version = "1.0.0"
description = "asks nodes for their names"
license = "Apache-2.0"
dependencies = ["flwr>=1.42"]

[tool.flwr.app]
publisher = "fedprior"

[tool.flwr.app.components]
serverapp = "asks.app:server"
clientapp = "asks.app:client"

[tool.flwr.app.config]
nodes = 1
seconds = 60.0
out = ""
"""

APP = """
import json, os, time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()


@client.query()
def answer(message, context):
    said = {"name": context.node_config["name"], "folder": os.getcwd()}
    return Message(RecordDict({"answer": ConfigRecord(said)}), reply_to=message)


@server.main()
def ask(grid, context):
    end = time.time() + context.run_config["seconds"]
    while len(nodes := list(grid.get_node_ids())) < context.run_config["nodes"] and time.time() < end:
        time.sleep(0.2)
    left = set(grid.push_messages([Message(RecordDict(), dst_node_id=n, message_type="query") for n in nodes]))
    got = []
    while left and time.time() < end:
        for reply in grid.pull_messages(left):
            left.discard(reply.metadata.reply_to_message_id)
            got.append(dict(reply.content["answer"]) | {"node": reply.metadata.src_node_id})
        time.sleep(0.2)
    Path(context.run_config["out"]).write_text(json.dumps(got))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """site-0 is connected; site-1 has a registered key and does not run; site-2 has a key that nobody registered."""
    made = Cluster(tmp_path_factory.mktemp("cluster"), nodes=1, watch=True)
    with made as running:
        running.sites += layout.add(running.root, 1)
        running.settle(running.sites[1], {})
        running.register()
        running.sites += layout.add(running.root, 1)
        running.settle(running.sites[2], {})
        app = running.folder / "asks" / "asks"
        app.mkdir(parents=True)
        (app / "app.py").write_text(APP)
        (app / "__init__.py").touch()
        (app.parent / "pyproject.toml").write_text(PYPROJECT)
        yield running
        assert running.tried() == []


def ask(cluster, nodes):
    """One round of questions. -> {name: what the node said}"""
    out = cluster.folder / f"said-{time.monotonic_ns()}.json"
    run = cluster.submit(cluster.folder / "asks", nodes=nodes, out=str(out))
    assert cluster.wait(run) == "finished:completed", cluster.log(run)
    return {one["name"]: one for one in json.loads(out.read_text())}


TAKEN = r"(?s)code: 2004\].*was refused.*starts again in 15 s"  # and may be let in then


def refused(cluster, name, reason, folder=None, command=None):
    """Starts a node that must not be let in. It is to say `reason` soon, and ends by itself unless that may change."""
    before = cluster.output("superlink").count("Activated node_id")
    process = cluster.spawn(name, command or fedprior("deploy", "start", folder), **cluster.flower_env())
    cluster.until(name, reason, timeout=60)
    said = cluster.output(name)
    if reason != TAKEN:
        assert process.wait(20) == 1
    cluster.kill(name, 15, tree=False)
    assert "SuperNode ID:" not in said
    assert "Receiving:" not in cluster.output(name)
    assert cluster.output("superlink").count("Activated node_id") == before


def copied(cluster, number, name):
    """A folder like that of site-`number`, to be spoilt."""
    target = cluster.folder / "spoilt" / name
    shutil.copytree(cluster.sites[number], target)
    return target


def supernode(cluster, *words):
    """A SuperNode as somebody starts it by hand."""
    address = f"127.0.0.1:{cluster.port}"
    return [start.executable("flower-supernode"), "--superlink", address, "--port", str(start.free_port()), *words]


def test_only_the_registered_node_is_asked(cluster):
    said = ask(cluster, 1)
    assert list(said) == ["site-0"]
    assert said["site-0"]["folder"] == str(cluster.sites[0])  # relative paths in node.toml count from there


def test_a_server_of_another_authority_is_refused(cluster):
    folder = copied(cluster, 1, "authority")
    (folder / "ca.crt").write_bytes(certificates.authority().certificate)
    refused(cluster, "authority", "CERTIFICATE_VERIFY_FAILED", folder)


@contextlib.contextmanager
def impostor(cluster, pair):
    """Something that listens with another certificate. -> its port"""
    for name, data in (("crt", pair.certificate), ("key", pair.key)):
        (cluster.folder / f"impostor.{name}").write_bytes(data)
    port = start.free_port()
    command = [start.executable("flower-superlink"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--ssl-ca-certfile", str(cluster.server / "ca.crt"), "--isolation", "process"]
    command += ["--ssl-certfile", "impostor.crt", "--ssl-keyfile", "impostor.key", "--enable-supernode-auth"]
    cluster.spawn("impostor", command, **cluster.flower_env())
    try:
        cluster.until("impostor", "Uvicorn running on")
        yield port
    finally:
        cluster.kill("impostor", 15)


@pytest.mark.parametrize(
    ("kind", "names", "days", "reason"),
    [
        ("expired", ("localhost",), -1, "certificate has expired"),
        ("named otherwise", ("elsewhere.example.org",), 9, "Hostname mismatch"),
    ],
)
def test_a_certificate_that_is_not_good_is_refused(cluster, kind, names, days, reason, monkeypatch):
    signer = certificates.Pair((cluster.root / "ca/ca.crt").read_bytes(), (cluster.root / "ca/ca.key").read_bytes())
    if kind == "named otherwise":
        monkeypatch.setattr(certificates, "LOOPBACK", ())
    folder = copied(cluster, 1, kind)
    with impostor(cluster, certificates.server(signer, names, days)) as port:
        path = folder / "deploy.toml"
        path.write_text(path.read_text().replace(str(cluster.port), str(port)))
        refused(cluster, kind, reason, folder)


def test_an_unregistered_key_is_refused_until_it_is_registered_and_a_removed_one_for_ever(cluster):
    refused(cluster, "stranger", TAKEN, cluster.sites[2])
    cluster.register()
    cluster.start_node(2)
    assert set(ask(cluster, 2)) == {"site-0", "site-2"}
    layout.revoke(cluster.root, "site-2")
    assert "unregistered: site-2" in cluster.register().stdout
    cluster.until("site-2", "starts again in 15 s")
    assert "its key was removed" in cluster.output("site-2")
    cluster.kill("site-2", 15, tree=False)
    refused(cluster, "removed", TAKEN, cluster.sites[2])
    assert set(ask(cluster, 1)) == {"site-0"}


def test_a_key_that_is_in_use_is_refused_and_its_node_goes_on(cluster):
    refused(cluster, "thief", TAKEN, copied(cluster, 0, "thief"))
    assert set(ask(cluster, 1)) == {"site-0"}


def test_a_node_without_a_key_or_without_tls_is_refused(cluster):
    authority = ["--root-certificates", str(cluster.server / "ca.crt")]
    refused(cluster, "keyless", r"code: 2001\]", command=supernode(cluster, *authority))
    limits = ["--insecure", "--max-retries", "1", "--max-wait-time", "5"]
    refused(cluster, "plain", "(?i)failed to initialize", command=supernode(cluster, *limits))


BY_ANOTHER_CLOCK = """
import datetime, sys
import flwr.supernode.node_auth_http_interceptor as signing
from flwr.supernode.cli.flower_supernode import flower_supernode

ahead = datetime.timedelta(seconds=float(sys.argv.pop(1)))
signing.now = lambda real=signing.now: real() + ahead
flower_supernode()
"""


@pytest.mark.parametrize(("ahead", "well"), [(15, False), (-400, False), (-240, True)])
def test_a_node_whose_clock_is_off_is_refused_where_the_check_says_so(cluster, ahead, well):
    assert check.clock(ahead).ok == well
    _, *words = supernode(cluster, "--root-certificates", cluster.server / "ca.crt")
    words += ["--auth-supernode-private-key", cluster.sites[1] / "node.key"]
    name = f"clock{ahead}"
    process = cluster.spawn(name, [sys.executable, "-c", BY_ANOTHER_CLOCK, str(ahead), *words], **cluster.flower_env())
    if well:
        cluster.until(name, "SuperNode ID:")
    else:
        assert process.wait(60) == 0  # Flower says nothing of the reason
        assert "SuperNode ID:" not in cluster.output(name)
    cluster.kill(name, 15)


def children(cluster, name):
    return psutil.Process(cluster.processes[name].pid).children()


def test_a_stopped_node_comes_back_at_once_as_the_same_and_a_killed_one_by_itself(cluster):
    cluster.kill("site-0", 15, tree=False)
    cluster.start_node(0)
    served = cluster.output("site-0").count("SuperNode ID:")
    for process in children(cluster, "site-0"):
        process.kill()
    cluster.until("site-0", "SuperNode ID:", times=served + 1, timeout=120)
    assert "was killed (signal 9)" in cluster.output("site-0")
    assert len(set(re.findall(r"SuperNode ID: (\d+)", cluster.output("site-0")))) == 1
    assert cluster.reap() == 0  # no process was left behind


def test_a_killed_superlink_comes_back_with_its_nodes(cluster):
    for process in children(cluster, "superlink"):
        process.kill()
    cluster.until("superlink", "starts again in 3 s")
    cluster.until("superlink", "Uvicorn running on", times=2)
    assert set(ask(cluster, 1)) == {"site-0"}
    assert cluster.reap() == 0


def test_check_says_that_the_superlinks_own_port_is_open_to_more_than_nodes(cluster):
    done = cluster.run(fedprior("deploy", "check", cluster.sites[0], "--json"), check=False)
    assert done.returncode == 1
    checks = {one["name"]: one for one in json.loads(done.stdout.splitlines()[-1])["checks"]}
    assert {name for name, one in checks.items() if not one["ok"]} == {"control closed", "runtime closed"}
    server = cluster.run(fedprior("deploy", "check", cluster.server, "--json"), check=False)
    checks = {one["name"]: one for one in json.loads(server.stdout.splitlines()[-1])["checks"]}
    assert "site-0 online" in checks["nodes"]["found"]
    assert checks["nodes"]["ok"] == ("site-2 unknown" not in checks["nodes"]["found"])  # another test may remove it
    assert all(one["ok"] for name, one in checks.items() if name != "nodes")


@pytest.fixture(scope="module")
def proxied(tmp_path_factory):
    if not shutil.which(os.environ.get("NGINX", "nginx")):
        pytest.skip("there is no nginx on the PATH or in the variable NGINX")
    with Cluster(tmp_path_factory.mktemp("proxied"), nodes=1, proxy=True, watch=True) as running:
        yield running
        assert running.tried() == []


@contextlib.contextmanager
def connected(cluster):
    context = ssl.create_default_context(cafile=str(cluster.server / "ca.crt"))
    connection = http.client.HTTPSConnection("localhost", cluster.public_port, timeout=20, context=context)
    with contextlib.closing(connection):
        yield connection


def status(cluster, method, path, body=b""):
    with connected(cluster) as connection:
        connection.putrequest(method, path, skip_accept_encoding=True)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        return connection.getresponse().status


def test_the_proxy_passes_what_nodes_need_and_nothing_else(proxied, cluster):
    from flwr.superlink.main import create_app

    paths = {(method.upper(), path) for path, found in create_app().openapi()["paths"].items() for method in found}
    closed = {(method, path) for method, path in paths if path.removeprefix("/v1/fleet/") not in layout.FLEET}
    closed = closed - {("GET", "/health"), ("HEAD", "/health")} | {("GET", "/docs"), ("GET", "/openapi.json")}
    assert len(closed) > 60  # control, runtime, what a SuperNode without a key would ask, the pages about the API
    assert {"/v1/control/start-run", "/v1/runtime/acquire-task"} <= {path for _, path in closed}
    for method, path in sorted(closed):
        assert status(proxied, method, path) == 403, path
    for path in (
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet/..%2fcontrol/list-runs",
    ):
        assert status(proxied, "POST", path) == 403, path
    for name in layout.FLEET:
        assert ("POST", f"/v1/fleet/{name}") in paths
        assert status(proxied, "GET", f"/v1/fleet/{name}") == 403
        assert status(proxied, "POST", f"/v1/fleet/{name}") in (400, 401, 415, 422), name  # Flower's own refusal
    assert proxied.healthy(proxied.public_port)
    shutil.copytree(cluster.folder / "asks", proxied.folder / "asks")
    assert set(ask(proxied, 1)) == {"site-0"}
    checked = proxied.run(fedprior("deploy", "check", proxied.sites[0], "--json"))
    assert json.loads(checked.stdout.splitlines()[-1])["ok"]


def test_the_proxy_takes_no_body_above_its_cap_and_no_plain_http(proxied):
    with connected(proxied) as connection:
        connection.putrequest("POST", "/v1/fleet/push-object")
        connection.putheader("Content-Length", str(layout.BODY_MB * 2**20 + 1))
        connection.endheaders()
        assert connection.getresponse().status == 413
    body = bytes(layout.BODY_MB * 2**20)
    assert status(proxied, "POST", "/v1/fleet/push-object", body) != 413
    with socket.create_connection(("127.0.0.1", proxied.public_port), 10) as plain:
        plain.sendall(b"POST /v1/fleet/pull-messages HTTP/1.0\r\n\r\n")
        assert plain.recv(100).startswith(b"HTTP/1.1 400")
