"""A federation's processes on loopback, started from the folders that `fedprior deploy init` writes."""

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import tomli_w

from fedprior.deploy import layout, start

MARK = "FEDPRIOR_TEST_CLUSTER"  # every process of a cluster carries it, orphans too

NETWATCH = '''
"""Logs and refuses every look-up and connection that leaves this machine."""
import os, socket, sys

LOG, LOCAL = os.environ["NETWATCH_LOG"], {"localhost", "::1", "0.0.0.0", "::", "", None}

def local(host):
    host = host.decode() if isinstance(host, bytes) else host
    return host in LOCAL or host.startswith("127.")

def note(kind, what):
    with open(LOG, "a") as f:
        f.write(f"{kind} {what} {os.getpid()} {' '.join(sys.argv[:1])}\\n")

def look_up(host, *rest, _real=socket.getaddrinfo, **more):
    if not local(host):
        note("look-up", host)
        raise socket.gaierror("netwatch: refused")
    return _real(host, *rest, **more)

def guard(real, answer):
    def connect(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and not local(address[0]):
            note("connection", address)
            return answer()
        return real(self, address)
    return connect

def refuse():
    raise OSError("netwatch: refused")

socket.getaddrinfo = look_up
socket.socket.connect = guard(socket.socket.connect, refuse)
socket.socket.connect_ex = guard(socket.socket.connect_ex, lambda: 101)
'''


class Cluster:
    """A SuperLink and nodes site-0, site-1, ... under `folder`; all end, by their pids, when the block does.

    `node_toml` is {number: keys that replace or join those of its node.toml}. With `proxy` nodes go through nginx (the
    program that NGINX or PATH names) with the shipped configuration. With `watch` no process reaches anything but
    loopback, and what was tried is in `tried()`. `env` goes to every process.
    """

    def __init__(self, folder, nodes=2, node_toml=None, proxy=False, env=None, watch=False):
        self.folder, self.proxy = Path(folder).resolve(), proxy
        self.root = self.folder / "deployment"
        self.server = self.root / "server"
        self.port, self.public_port = start.free_port(), start.free_port()
        self.processes = {}
        self.env = {
            **os.environ,
            MARK: str(self.folder),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
            **(env or {}),
        }
        self.sites = layout.init(self.root, nodes, ("localhost",), self.public_port, self.port)
        for number, site in enumerate(self.sites):
            self.settle(site, (node_toml or {}).get(number, {}))
        if watch:
            (self.folder / "netwatch").mkdir()
            (self.folder / "netwatch" / "sitecustomize.py").write_text(NETWATCH)
            self.env["PYTHONPATH"] = os.pathsep.join(
                filter(None, [str(self.folder / "netwatch"), self.env.get("PYTHONPATH")])
            )
            self.env["NETWATCH_LOG"] = str(self.folder / "netwatch.log")

    def settle(self, site, node_toml):
        """Points a node's folder at this cluster and changes its node.toml."""
        if not self.proxy:
            path = site / "deploy.toml"
            path.write_text(path.read_text().replace(f"localhost:{self.public_port}", f"localhost:{self.port}"))
        path = site / "node.toml"
        path.write_text(tomli_w.dumps(tomllib.loads(path.read_text()) | node_toml))

    def __enter__(self):
        try:
            self.start_superlink()
            if self.proxy:
                self.start_proxy()
            self.register()
            for number in range(len(self.sites)):
                self.start_node(number, wait=False)
            for site in self.sites:
                self.until(site.name, "SuperNode ID:")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Ends the nodes, then what they are connected to, then whatever is left."""
        nodes = [name for name in self.processes if name not in ("superlink", "proxy")]
        for name in nodes:
            self.processes[name].terminate()
        for name in (*nodes, *self.processes.keys() - set(nodes)):
            self.kill(name, signal.SIGTERM, tree=False)
        self.reap()

    # processes

    def spawn(self, name, command, **env):
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**self.env, **env},
                start_new_session=True,
            )
        return self.processes[name]

    def start_superlink(self, wait=True):
        process = self.spawn("superlink", fedprior("deploy", "start", self.server))
        if wait:
            self._until(lambda: self.healthy(self.port), "the SuperLink does not answer", "superlink")
        return process

    def start_proxy(self):
        """nginx with the shipped configuration, as the user who runs the tests."""
        rights = ["-g", "user root;"] if os.geteuid() == 0 else []  # else its workers would be nobody
        process = self.spawn(
            "proxy", [os.environ.get("NGINX", "nginx"), "-p", self.server, "-c", "nginx.conf", *rights]
        )
        self._until(lambda: self.healthy(self.public_port), "the proxy does not answer", "proxy")
        return process

    def start_node(self, number, wait=True, timeout=90):
        """Starts site-`number`; a node that was killed is let in again only after up to a minute."""
        name = f"site-{number}"
        before = self.output(name).count("SuperNode ID:")
        process = self.spawn(name, fedprior("deploy", "start", self.root / name))
        if wait:
            self.until(name, "SuperNode ID:", times=before + 1, timeout=timeout)
        return process

    def kill(self, name, signal=signal.SIGKILL, tree=True):
        """Sends a signal to a process, by default also to all that it started, and waits for its end."""
        process = self.processes.pop(name)
        try:
            started = psutil.Process(process.pid).children(recursive=True) if tree else []
        except psutil.NoSuchProcess:
            started = []
        for one in [process, *started]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        psutil.wait_procs(started, timeout=10)

    def reap(self):
        """Ends what is left of this cluster without a parent here. -> how many there were."""
        mine = {p.pid for process in self.processes.values() for p in _tree(process.pid)}
        left = [p for p in psutil.process_iter() if p.pid not in mine and _marked(p, str(self.folder))]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=10)
        return len(left)

    def output(self, name):
        """What a process has said so far, over all its starts."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, name, pattern, times=1, timeout=90):
        """Waits until a process has said something for the `times`-th time."""
        self._until(lambda: len(re.findall(pattern, self.output(name))) >= times, f"no '{pattern}'", name, timeout)

    def _until(self, true, what, name, timeout=90):
        end = time.monotonic() + timeout
        while not true():
            process = self.processes.get(name)
            ended = process is not None and process.poll() is not None
            if (ended and not true()) or time.monotonic() > end:
                raise AssertionError(f"{what} {'any more' if ended else 'in time'}:\n{self.output(name)[-3000:]}")
            time.sleep(0.2)

    def healthy(self, port):
        try:
            context = ssl.create_default_context(cafile=str(self.server / "ca.crt"))
            return urllib.request.urlopen(f"https://localhost:{port}/health", timeout=5, context=context).status == 200
        except (urllib.error.URLError, OSError):
            return False

    def tried(self):
        """Look-ups and connections that would have left this machine."""
        path = self.folder / "netwatch.log"
        return path.read_text().splitlines() if path.exists() else []

    # commands of an administrator on the server

    def run(self, command, check=True, timeout=120):
        done = subprocess.run(
            [*map(str, command)],
            capture_output=True,
            text=True,
            cwd=self.folder,
            timeout=timeout,
            env={**self.env, **self.flower_env()},
        )
        if check and done.returncode:
            raise AssertionError(
                f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            )
        return done

    def flower_env(self):
        """The variables with which `flwr` finds this cluster, its connection being called fedprior."""
        here = start.environment(layout.read(self.server))
        return {name: value for name, value in here.items() if value != os.environ.get(name)}

    def flwr(self, *words, check=True):
        return self.run([start.executable("flwr"), *words], check)

    def register(self):
        return self.run(fedprior("deploy", "register", self.server))

    def submit(self, app_dir, **run_config):
        """-> the run's id. Keys of the run's configuration may have _ for -."""
        words = ["run", app_dir, layout.CONNECTION, "--format", "json"]
        if run_config:
            pairs = [f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in run_config.items()]
            words += ["--run-config", " ".join(pairs)]
        done = self.flwr(*words)
        found = re.search(r'"run-id":\s*"?(\d+)', done.stdout)
        assert found, done.stdout + done.stderr
        return int(found[1])

    def status(self, run_id):
        """pending, starting, running, or finished:completed, finished:failed, finished:stopped."""
        from flwr.proto.control_pb2 import ListRunsRequest
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor

        with ControlHttpClient.from_server_address(
            f"127.0.0.1:{self.port}",
            insecure=False,
            root_certificates=(self.server / "ca.crt").read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        ) as client:
            status = client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
        return status.status + (f":{status.sub_status}" if status.sub_status else "")

    def wait(self, run_id, timeout=180):
        """-> how a run finished. Raises AssertionError, with its log, when it does not in time."""
        end = time.monotonic() + timeout
        while not (found := self.status(run_id)).startswith("finished"):
            if time.monotonic() > end:
                raise AssertionError(f"run {run_id} is {found} after {timeout} s:\n{self.log(run_id)[-3000:]}")
            time.sleep(0.5)
        return found

    def log(self, run_id):
        done = self.flwr("log", run_id, layout.CONNECTION, "--show", check=False)
        return done.stdout + done.stderr


def fedprior(*words):
    """The command line as a command."""
    return [sys.executable, "-m", "fedprior.cli", *map(str, words)]


def _tree(pid):
    try:
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _marked(process, mark):
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False
