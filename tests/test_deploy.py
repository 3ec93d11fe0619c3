"""Folders of a deployment: certificates by real handshakes, keys as Flower reads them, supervision, checks."""

import http.server
import os
import re
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import psutil
import pytest
from test_cli import call, last_json

from fedprior.deploy import certificates, check, layout, start
from fedprior.errors import UsageError


@pytest.fixture(scope="module")
def signer():
    return certificates.authority()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A deployment that no test changes."""
    folder = tmp_path_factory.mktemp("made") / "deployment"
    layout.init(folder, 2, ("fl.example.org", "192.0.2.7", "2001:db8::7"))
    return folder


@pytest.fixture
def own(made, tmp_path):
    """One that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "own"))


# Certificates


def files(folder, pair, name="server"):
    folder.mkdir(exist_ok=True)
    for suffix, data in (("crt", pair.certificate), ("key", pair.key)):
        (folder / f"{name}.{suffix}").write_bytes(data)
    return str(folder / f"{name}.crt"), str(folder / f"{name}.key")


def handshake(folder, pair, authority, name):
    """A TLS handshake in memory, as strict as Python is by default since 3.13."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(*files(folder, pair))
    asking = ssl.create_default_context(cadata=authority.decode())
    asking.verify_flags |= ssl.VERIFY_X509_STRICT
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = asking.wrap_bio(back, there, server_hostname=name), serving.wrap_bio(there, back, server_side=True)
    open_ends = [client, server]
    while open_ends:
        for end in list(open_ends):
            try:
                end.do_handshake()
                open_ends.remove(end)
            except ssl.SSLWantReadError:
                pass


@pytest.mark.parametrize("name", ["fl.example.org", "192.0.2.7", "2001:db8::7", "localhost", "127.0.0.1", "::1"])
def test_a_server_is_trusted_under_each_of_its_names(signer, tmp_path, name):
    pair = certificates.server(signer, ("fl.example.org", "192.0.2.7", "2001:db8::7"), 30)
    handshake(tmp_path, pair, signer.certificate, name)


def test_a_server_is_not_trusted_under_another_name_by_others_or_once_it_expired(signer, tmp_path):
    pair = certificates.server(signer, ("fl.example.org",), 30)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(tmp_path, pair, signer.certificate, "example.org")
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        handshake(tmp_path, pair, certificates.authority().certificate, "fl.example.org")
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(tmp_path, certificates.server(signer, (), -1), signer.certificate, "localhost")
    below = certificates.server(pair, ("fl.example.org",), 30)  # a server's key signs nothing
    chain = certificates.Pair(below.certificate + pair.certificate, below.key)
    with pytest.raises(ssl.SSLCertVerificationError, match="invalid CA"):
        handshake(tmp_path, chain, signer.certificate, "fl.example.org")


def test_only_the_authority_may_sign(signer):
    from cryptography import x509

    for pair, may in ((signer, True), (certificates.server(signer, (), 9), False)):
        found = x509.load_pem_x509_certificate(pair.certificate).extensions
        constraints = found.get_extension_for_class(x509.BasicConstraints)
        assert constraints.critical
        assert (constraints.value.ca, constraints.value.path_length) == (may, 0 if may else None)
        assert found.get_extension_for_class(x509.KeyUsage).value.key_cert_sign == may


def test_facts_of_a_certificate(signer, tmp_path):
    pair, other = certificates.server(signer, ("a.org",), 30), certificates.server(signer, ("a.org",), 30)
    crt, key = map(Path, files(tmp_path, pair))
    ca, _ = map(Path, files(tmp_path, signer, "ca"))
    facts = certificates.facts(crt, key, ca)
    assert facts.names == ("a.org", "localhost", "127.0.0.1", "::1")
    assert facts.days == pytest.approx(30, abs=0.01)
    assert facts.issued_by
    assert facts.belongs
    key.write_bytes(other.key)
    ca.write_bytes(certificates.authority().certificate)
    facts = certificates.facts(crt, key, ca)
    assert not facts.issued_by
    assert not facts.belongs


# Keys of nodes


def test_flower_reads_a_nodes_keys_and_they_belong_together(tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, sign_message, verify_signature

    private, public = certificates.node_key("site-0")
    (tmp_path / "key.pub").write_bytes(public)
    known = try_load_public_key(tmp_path / "key.pub")
    key = certificates.load_key(private)
    assert isinstance(key.curve, SECP384R1)
    assert verify_signature(bytes_to_public_key(known), b"text", sign_message(key, b"text"))
    assert not verify_signature(bytes_to_public_key(known), b"text", sign_message(key, b"other"))
    assert certificates.public_pem(public) == certificates.public_of(private) == known
    assert certificates.node_key("site-0")[0] != private


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="there is no ssh-keygen")
def test_ssh_keygen_reads_a_nodes_private_key(tmp_path):
    private, public = certificates.node_key("site-0")
    path = tmp_path / "key"
    path.write_bytes(private)
    path.chmod(0o600)
    said = subprocess.run(["ssh-keygen", "-y", "-f", path], capture_output=True, check=True).stdout
    assert said.split()[:2] == public.split()[:2]


@pytest.mark.parametrize("data", [b"", b"no key", b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n", b"ssh-rsa AAAA x"])
def test_what_is_no_key_is_a_value_error(data):
    with pytest.raises(ValueError, match=r"."):
        certificates.load_key(data)
    with pytest.raises(ValueError, match=r"."):
        certificates.public_pem(data)


# Folders


def test_only_their_owner_reads_private_keys_and_folders(made):
    secrets = {"ca/ca.key", "server/server.key", "site-0/node.key", "site-1/node.key"}
    found = {str(p.relative_to(made)): stat.S_IMODE(p.stat().st_mode) for p in made.rglob("*") if p.is_file()}
    assert {name for name, mode in found.items() if mode == 0o600} == secrets
    assert {name for name, mode in found.items() if mode & 0o022} == set()
    for name in ("ca", "server", "server/nodes", "site-0", "site-1"):
        assert stat.S_IMODE((made / name).stat().st_mode) == 0o700
    keys = {path: path.read_text() for path in made.rglob("*") if path.is_file() and path.suffix != ".key"}
    assert [path for path, text in keys.items() if "PRIVATE KEY" in text] == []


def test_a_site_gets_no_secret_but_its_own(made):
    for site in ("site-0", "site-1"):
        assert {p.name for p in (made / site).rglob("*.key")} == {"node.key"}
        public = certificates.public_pem((made / "server" / "nodes" / f"{site}.pub").read_bytes())
        assert certificates.public_of((made / site / "node.key").read_bytes()) == public
    assert not (made / "server" / "ca.key").exists()


def test_every_file_is_filled_in_and_of_its_kind(made):
    for path in made.rglob("*"):
        if path.is_file():
            assert not re.search(r"\{\{|\{%|%\}|\}\}|None|TODO", path.read_text()), path
    for path in made.rglob("*.toml"):
        tomllib.loads(path.read_text())
    for path in made.rglob("start.sh"):
        assert os.access(path, os.X_OK)
        subprocess.run(["sh", "-n", path], check=True)
    server = layout.read(made / "server")
    assert server.names == ("fl.example.org", "192.0.2.7", "2001:db8::7")
    assert (server.host, server.port, server.public_port) == ("127.0.0.1", 8000, 8443)
    assert layout.read(made / "site-1") == layout.Node(made / "site-1", "site-1", "fl.example.org:8443")
    assert tomllib.loads((made / "site-1" / "node.toml").read_text()) == {
        "name": "site-1",
        "clients": "1",
        "state-dir": "state",
    }


def test_what_node_toml_offers_is_what_a_node_understands(made):
    from fedprior.node_settings import Settings

    text = (made / "site-0" / "node.toml").read_text()
    offered = tomllib.loads(re.sub(r"(?m)^# (?=[a-z-]+ =)", "", text))
    assert {"data", "prior", "device", "share-label-counts"} <= offered.keys()
    assert Settings.read(offered).clients == (0,)


def test_commands_that_the_instructions_name_exist(made):
    from fedprior.commands.deploy import app

    commands = {command.name for command in app.registered_commands}
    named = set(re.findall(r"fedprior deploy ([a-z]+)", (made / "README.md").read_text()))
    assert named <= commands
    assert {"add", "rotate", "remove", "register", "check"} <= named
    text = "".join(path.read_text() for path in made.rglob("*") if path.is_file())
    assert set(re.findall(r"fedprior deploy ([a-z]+)", text)) <= commands


def test_flowers_config_follows_the_folder(own):
    from flwr.cli.flower_config import parse_superlink_connection

    layout.connection(layout.read(own / "server"))
    found = tomllib.loads((own / "server" / "flwr" / "config.toml").read_text())["superlink"]
    assert found["default"] == "fedprior"
    connection = parse_superlink_connection(found["fedprior"], "fedprior")
    assert connection.address == "127.0.0.1:8000"
    assert connection.root_certificates == str(own / "server" / "ca.crt")
    assert not connection.insecure
    for host, control in (("0.0.0.0", "127.0.0.1:8000"), ("192.0.2.7", "192.0.2.7:8000"), ("::", "[::1]:8000")):
        server = layout.Server(own / "server", host, 8000, 8443, ("a",))
        assert server.control == control


def test_start_sh_starts_its_own_folder_from_anywhere(made, tmp_path):
    script = made / "site-0" / "start.sh"
    done = subprocess.run(
        [script], cwd=tmp_path, env={**os.environ, "FEDPRIOR": "echo"}, capture_output=True, text=True
    )
    assert done.stdout == f"deploy start {made / 'site-0'}\n"


@pytest.mark.skipif(shutil.which(os.environ.get("NGINX", "nginx")) is None, reason="there is no nginx")
def test_nginx_takes_its_configuration(own):
    words = [os.environ.get("NGINX", "nginx"), "-t", "-p", own / "server", "-c", "nginx.conf"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert "test is successful" in done.stderr, done.stderr


def test_added_sites_are_numbered_on_and_a_number_is_given_once(own):
    assert [site.name for site in layout.add(own, 2)] == ["site-2", "site-3"]
    shutil.rmtree(own / "site-3")
    layout.revoke(own, "site-3")
    assert [site.name for site in layout.add(own, 1)] == ["site-4"]
    assert tomllib.loads((own / "site-4" / "node.toml").read_text())["clients"] == "4"
    assert (own / "site-4" / "ca.crt").read_bytes() == (own / "ca" / "ca.crt").read_bytes()


def test_a_rotated_key_takes_the_place_of_the_revoked_one(own):
    before, _ = layout.public_keys(own / "server")
    old = (own / "site-1" / "node.key").read_bytes()
    layout.rotate_site(own, "site-1")
    wanted, revoked = layout.public_keys(own / "server")
    assert wanted["site-0"] == before["site-0"]
    assert wanted["site-1"] == certificates.public_of((own / "site-1" / "node.key").read_bytes()) != before["site-1"]
    assert list(revoked.values()) == [before["site-1"]] == [certificates.public_of(old)]
    layout.rotate_site(own, "site-1")
    assert len(layout.public_keys(own / "server")[1]) == 2


def test_a_rotated_server_is_trusted_as_before_under_the_names_in_its_settings(own, tmp_path):
    path = own / "server" / "deploy.toml"
    path.write_text(path.read_text().replace('"192.0.2.7"', '"other.example.org"'))
    old = (own / "server" / "server.key").read_bytes()
    server = layout.rotate_server(own, 30)
    pair = certificates.Pair((server / "server.crt").read_bytes(), (server / "server.key").read_bytes())
    handshake(tmp_path, pair, (own / "site-0" / "ca.crt").read_bytes(), "other.example.org")
    assert pair.key != old
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, pair, (own / "site-0" / "ca.crt").read_bytes(), "192.0.2.7")


# Refusals


def spoilt(own, name, old, new):
    path = own / name / "deploy.toml"
    path.write_text(path.read_text().replace(old, new))
    return own / name


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["init", "{own}", "--nodes", "1"], 1, "is not empty"),
        (["init", "{own}/ca/ca.crt", "--nodes", "1"], 1, "is not empty"),
        (["init", "{own}/new", "--nodes", "1", "--port", "8000"], 2, "both 8000"),
        (["init", "{own}/new", "--nodes", "1", "--host", "https://fl.example.org"], 2, "no host name"),
        (["init", "{own}/new", "--nodes", "1", "--host", 'a";'], 2, "no host name"),
        (["init", "/dev/null/new", "--nodes", "1"], 1, "cannot write in /dev/null/new"),
        (["rotate", "{own}", "site-9"], 2, "unknown node 'site-9'; did you mean site-"),
        (["remove", "{own}", "../site-0"], 2, "unknown node"),
        (["add", "{own}/site-0"], 1, "holds no deployment"),
        (["register", "{own}/site-0"], 1, "is a node's folder"),
        (["start", "{own}"], 1, "did you mean"),
        (["check", "{own}/ca"], 1, "name a folder"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(own, capsys, words, code, says):
    before = {path: path.stat().st_mtime_ns for path in own.rglob("*")}
    got, _, err = call(capsys, "deploy", *(word.format(own=own) for word in words))
    assert got == code
    assert says in err
    assert err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in own.rglob("*")} == before


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("server", "port = 8000", 'port = "8000"', "port must be a number"),
        ("server", "port = 8000", "port = 80000", "between 1 and 65535"),
        ("server", "port = 8000", "prot = 8000", "it is missing"),
        ("server", "names = [", 'extra = 1\nnames = ["x", ', "unknown key"),
        ("server", 'role = "server"', 'role = "boss"', "role must be"),
        ("server", "names = [", "names = [1, ", "no host name"),
        ("site-0", ":8443", "", "no HOST:PORT"),
        ("site-0", "fl.example.org:8443", "https://fl.example.org:8443", "no host name"),
    ],
)
def test_settings_that_mean_nothing_are_refused(own, name, old, new, says):
    with pytest.raises(UsageError, match=says):
        layout.read(spoilt(own, name, old, new))


def test_a_superlink_that_others_reach_is_refused_without_a_proxy(own, capsys, monkeypatch):
    monkeypatch.setattr(start, "supervise", lambda program, variables: pytest.fail("it was started"))
    server = spoilt(own, "server", '"127.0.0.1"', '"0.0.0.0"')
    code, _, err = call(capsys, "deploy", "start", server)
    assert code == 2
    assert "submit code" in err
    assert "proxy_acknowledged" in err
    assert "0.0.0.0" in start.program_of(layout.read(server), proxy=True).command
    spoilt(own, "server", "# proxy_ack", "proxy_ack")
    assert "0.0.0.0" in start.program_of(layout.read(server)).command


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_hosts_that_only_this_machine_reaches(host):
    assert layout.loopback(host)
    assert not any(map(layout.loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org")))


# Starting


def test_programs_are_started_safely(made):
    server = start.program_of(layout.read(made / "server")).command
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation", "--database"} <= set(server)
    node = start.program_of(layout.read(made / "site-0")).command
    assert node[node.index("--superlink") + 1] == "fl.example.org:8443"
    assert {"--root-certificates", "--auth-supernode-private-key", "--node-config"} <= set(node)
    assert "--insecure" not in {*server, *node}


def test_the_shell_undoes_nothing_of_the_environment(made, monkeypatch):
    for name, value in (("FLWR_TELEMETRY_ENABLED", "1"), ("FLWR_INTERNAL_GRPC_FLEET_API", "1"), ("NO_PROXY", "intra")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    node, server = (start.environment(layout.read(made / name)) for name in ("site-0", "server"))
    for found in (node, server):
        assert found["FLWR_TELEMETRY_ENABLED"] == "0"
        assert "FLWR_INTERNAL_GRPC_FLEET_API" not in found
        assert found["NO_PROXY"].split(",") == ["intra", "localhost", "127.0.0.1", "::1"]
        assert found["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
        assert found["HF_HUB_OFFLINE"] == "0"
    assert server["FEDPRIOR_RUNS"] == str(made / "server" / "runs")
    assert "FEDPRIOR_RUNS" not in node
    assert {node["FLWR_HOME"], server["FLWR_HOME"]} == {str(made / "site-0" / "flwr"), str(made / "server" / "flwr")}


SUPERVISED = """
import os, sys
from fedprior.deploy import start
start.LOOK = 0.2
try:
    start.supervise(start.Program("program", ["sh", "-c", sys.argv[1]], b"serves", 0.1), dict(os.environ))
except start.UserError as error:
    sys.exit(f"ended: {error}")
"""


@contextmanager
def supervised(folder, script):
    """A shell script under supervision, in `folder`; its output goes to a file there."""
    with (folder / "said").open("w") as said:
        process = subprocess.Popen([sys.executable, "-c", SUPERVISED, script], cwd=folder, stdout=said, stderr=said)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def until(folder, words, times=1, name="said"):
    end = time.monotonic() + 30
    path = folder / name
    while (path.read_text() if path.exists() else "").count(words) < times:
        assert time.monotonic() < end, path.read_text() if path.exists() else f"no {path}"
        time.sleep(0.02)
    return path.read_text()


def test_a_program_that_ends_before_it_serves_is_not_tried_again(tmp_path):
    with supervised(tmp_path, "echo x >> tries; exit 3") as process:
        assert process.wait(30) == 1
    assert "ended (exit 3) before it served" in (tmp_path / "said").read_text()
    assert (tmp_path / "tries").read_text() == "x\n"


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("echo '[code: 2004] no'; exit 1", "was refused"),
        ("echo serves; exit 0", "ended by itself (exit 0)"),
        ("kill -9 $$", "was killed (signal 9)"),
        ("echo serves; sleep 60", "had lost the process that starts apps"),
    ],
)
def test_a_program_starts_again_and_ends_with_all_that_it_started(tmp_path, end, says):
    script = (
        "setsid sleep 61 & echo $! >> pids; "
        f"if [ ! -e tried ]; then touch tried; {end}; fi; "
        "sh -c 'sleep 62; :' flower-superexec & echo serves; wait"
    )
    with supervised(tmp_path, script) as process:
        until(tmp_path, "it starts again in 0.1 s")
        until(tmp_path, "\n", times=2, name="pids")
        until(tmp_path, "serves")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert says in (tmp_path / "said").read_text()
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert not psutil.pid_exists(pid)


# Checks


def verdicts(folder):
    """-> {check's name: check} of all that are not well"""
    found = list(check.run(folder))
    assert all(one.remedy or ";" in one.found for one in found if not one.ok)  # what to do is always said
    return {one.name: one for one in found if not one.ok}


@pytest.fixture
def quiet(own):
    """A server's and a node's folder for ports that are free."""
    for old, port in (("8000", start.free_port()), ("8443", start.free_port())):
        spoilt(own, "server", old, str(port))
        if old == "8443":
            spoilt(own, "site-0", f"fl.example.org:{old}", f"localhost:{port}")
    return own


@contextmanager
def answering(folder, port, pair, statuses=None, ahead=0.0):
    """A server on `port` with a certificate, which answers 403 but for `statuses`, by a clock that is `ahead`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response((statuses or {}).get(self.path, 403))
            self.end_headers()

        do_POST = do_GET

        def date_time_string(self, timestamp=None):
            return format_datetime(datetime.now(UTC) + timedelta(seconds=ahead), usegmt=True)

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_):  # a client that did not trust it
            pass

    server = Server(("127.0.0.1", port), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files(folder, pair))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def pair_of(folder, name):
    return certificates.Pair(*((folder / f"{name}.{suffix}").read_bytes() for suffix in ("crt", "key")))


def test_a_folder_that_is_well(quiet):
    assert verdicts(quiet / "server") == {}
    assert set(verdicts(quiet / "site-0")) == {"server"}


def test_check_prints_json_and_fails_for_a_problem(quiet, capsys):
    code, out, _ = call(capsys, "deploy", "check", quiet / "server", "--json")
    assert code == 0
    assert last_json(out)["ok"]
    assert all(one["ok"] and not one["remedy"] for one in last_json(out)["checks"])
    (quiet / "server" / "start.sh").unlink()
    code, out, err = call(capsys, "deploy", "check", quiet / "server", "--json")
    assert code == 1
    assert [one["name"] for one in last_json(out)["checks"] if not one["ok"]] == ["files"]
    assert "start.sh" in out
    assert err.count("\n") == 1


def test_files_that_are_open_missing_or_anothers_are_found(quiet):
    server, site = quiet / "server", quiet / "site-0"
    (server / "server.key").chmod(0o640)
    assert set(verdicts(server)) == {"server.key private"}
    shutil.copy(quiet / "ca" / "ca.key", server / "server.key")
    (server / "server.key").chmod(0o600)
    assert set(verdicts(server)) == {"key pair"}
    (site / "node.key").write_text("no key")
    assert "keys" in verdicts(site)
    (site / "node.key").unlink()
    assert {"files", "keys"} <= set(verdicts(site))
    (server / "nodes" / "site-0.pub").write_text("no key")
    assert "site-0.pub is no public key" in verdicts(server)["keys"].found


def test_a_certificate_that_is_not_good_is_found(quiet):
    server = quiet / "server"
    signer = pair_of(quiet / "ca", "ca")

    def replace(pair):
        files(server, pair)
        return verdicts(server)

    found = replace(certificates.server(signer, ("fl.example.org", "192.0.2.7", "2001:db8::7"), -3))
    assert set(found) == {"certificate"}
    assert "expired 3 days ago" in found["certificate"].found
    assert set(replace(certificates.server(signer, ("fl.example.org",), 100))) == {"names"}
    other = certificates.server(certificates.authority(), ("fl.example.org", "192.0.2.7", "2001:db8::7"), 100)
    assert set(replace(other)) == {"certificate's authority"}
    assert set(replace(certificates.server(signer, ("fl.example.org", "192.0.2.7", "2001:db8::7"), 5))) == {
        "certificate"
    }


def test_a_port_that_something_else_has_is_found(quiet):
    port = layout.read(quiet / "server").port
    with answering(quiet / "x", port, certificates.server(certificates.authority(), (), 9)):
        assert set(verdicts(quiet / "server")) == {"SuperLink"}
    with answering(quiet / "x", layout.read(quiet / "server").public_port, pair_of(quiet / "server", "server")):
        assert "start it on the server" in verdicts(quiet / "server")["proxy"].remedy


OPEN = {"/health": 200, "/v1/control/list-runs": 200, "/v1/runtime/acquire-task": 415}


def test_a_node_sees_whether_the_server_is_the_right_one_and_closed(quiet):
    site, good = quiet / "site-0", pair_of(quiet / "server", "server")
    signer, (_, port) = pair_of(quiet / "ca", "ca"), layout.split_address(layout.read(site).superlink)
    with answering(quiet / "x", port, good, {"/health": 200}):
        assert verdicts(site) == {}
    with answering(quiet / "x", port, good, OPEN):
        found = verdicts(site)
        assert set(found) == {"control closed", "runtime closed"}
        assert "SUBMIT CODE" in found["control closed"].remedy
    with answering(quiet / "x", port, good, {"/health": 502}):
        assert set(verdicts(site)) == {"server"}
    for pair, says in (
        (certificates.server(signer, (), -1), "expired"),
        (certificates.server(certificates.authority(), (), 9), "not trusted"),
    ):
        with answering(quiet / "x", port, pair, {"/health": 200}):
            assert says in verdicts(site)["server"].found


def test_a_server_of_another_name_is_found(quiet, monkeypatch):
    monkeypatch.setattr(certificates, "LOOPBACK", ())
    site, (_, port) = quiet / "site-0", layout.split_address(layout.read(quiet / "site-0").superlink)
    pair = certificates.server(pair_of(quiet / "ca", "ca"), ("fl.example.org",), 9)
    with answering(quiet / "x", port, pair, {"/health": 200}):
        found = verdicts(site)["server"]
    assert "not valid for 'localhost'" in found.found
    assert "correct superlink" in found.remedy


@pytest.mark.parametrize("ahead", [-30.0, 600.0])
def test_a_clock_that_flower_would_refuse_is_found(quiet, ahead):
    site, (_, port) = quiet / "site-0", layout.split_address(layout.read(quiet / "site-0").superlink)
    with answering(quiet / "x", port, pair_of(quiet / "server", "server"), {"/health": 200}, ahead):
        found = verdicts(site)
    assert set(found) == {"clock"}
    off = float(re.match(r"[\d.]+", found["clock"].found)[0])
    assert off == pytest.approx(abs(ahead), abs=2)
    assert ("ahead of" if ahead < 0 else "behind") in found["clock"].found


def test_the_clocks_limits_lie_within_flowers():
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

    assert 0 < SYSTEM_TIME_TOLERANCE - check.AHEAD <= 1
    assert 0 < SYSTEM_TIME_TOLERANCE + TIMESTAMP_TOLERANCE - check.BEHIND <= 10
    assert check.clock(None).ok
    assert check.clock(3.0).ok
    assert not check.clock(5.0).ok
    assert check.clock(-290.0).ok
    assert not check.clock(-301.0).ok


def test_what_a_node_lacks_is_found(quiet, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = quiet / "site-0" / "node.toml"
    text = path.read_text()
    path.write_text(text + 'data = "nowhere"\nprior = "nowhere either"\ndevice = "cuda"\n')
    found = verdicts(quiet / "site-0")
    assert set(found) == {"data", "prior", "device", "server"}
    assert str(quiet / "site-0" / "nowhere") in found["data"].found
    assert "nowhere either" in found["prior"].found
    for line, says in (('divice = "cpu"', "did you mean device"), ("no toml", "is no TOML")):
        path.write_text(text + line + "\n")
        assert says in verdicts(quiet / "site-0")["node"].found


def test_data_beside_node_toml_are_found_from_anywhere(quiet):
    from PIL import Image

    for name in ("cat", "dog"):
        (quiet / "site-0" / "images" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(quiet / "site-0" / "images" / name / "0.png")
    path = quiet / "site-0" / "node.toml"
    path.write_text(path.read_text() + 'data = "images"\nprior = "digits"\ndevice = "cpu"\n')
    found = {one.name: one for one in check.run(quiet / "site-0")}
    assert all(found[name].ok for name in ("data", "prior", "device", "state writable"))
