"""The script that measures runs over Flower: what it makes of what it sees."""

import ast
import json
import socket
import threading
from importlib import import_module
from pathlib import Path
from random import Random

import pytest
import torch

from fedprior import nets, submit
from fedprior.deploy import start


@pytest.fixture
def script(monkeypatch):
    """The script as a module; nets that it makes known are forgotten again."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    monkeypatch.setattr(nets, "NETS", dict(nets.NETS))
    return import_module("flower")


def said(script, *lines):
    return [script.Said(float(moment), text) for moment, text in lines]


def test_visits_are_read_from_what_a_node_says(script):
    node = said(
        script,
        (1, "INFO :      Receiving: query.hello message (ID: 12)"),
        (2, "INFO :      Received successfully"),
        (3, "INFO :      Start `flwr-clientapp` process"),
        (5, "INFO :      Sending: query.hello message (ID: 34)"),
        (8, "INFO :      Sent successfully"),
        (9, "INFO :      "),
        (10, "INFO :      Receiving: train message (ID: 56)"),
        (11, "ERROR :     Failed to receive message 56: broken"),
        (13, "INFO :      Receiving: train message (ID: 56)"),
        (17, "INFO :      Received successfully"),
        (25, "INFO :      Sending: train message (ID: 78)"),
        (41, "INFO :      Sent successfully"),
        (50, "INFO :      Receiving: train message (ID: 90)"),
        (51, "INFO :      Received successfully"),
    )
    assert list(script.visits(node)) == [
        script.Visit("query.hello", 1, 2, 5, 8),
        script.Visit("train", 13, 17, 25, 41),
    ]


def test_stages_are_those_of_the_slower_node_and_add_up_to_the_round(script):
    quick, slow = script.Visit("train", 11, 12, 14, 15), script.Visit("train", 13, 14, 19, 22)
    assert script.stages(10, 30, [slow, quick]) == (3, 1, 5, 3, 8) == script.stages(10, 30, [quick, slow])
    assert sum(script.stages(10, 30, [slow, quick])) == 20
    assert len(script.STAGES) == 5


def test_a_round_is_what_lies_between_two_lines_less_its_evaluation(script):
    seconds, evaluated = [7.0, 9.0, 15.0], [1.0, 0.5, 2.0]
    timings = [{"seconds": s, "evaluation_seconds": e} for s, e in zip(seconds, evaluated, strict=True)]
    assert script.round_seconds(timings) == [1.5, 4.0]
    totals = [{"up": 5}, {"up": 8}, {"up": 13}, {"up": 20}]
    assert script.a_round(totals, "up") == 5.0


def test_a_line_that_is_being_written_is_no_line_yet(script, tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert script.lines_of(path) == []
    path.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert script.lines_of(path) == [{"round": 1}, {"round": 2}]


def life(script, machine, role, *samples):
    """Samples are (time, MB, CPU seconds)."""
    return script.Life(machine, role, [script.Sample(t, m * 10**6, 2 * m * 10**6, cpu) for t, m, cpu in samples])


def test_memory_together_is_the_most_at_one_moment(script):
    draw = Random(0)
    spans = [sorted(draw.sample(range(30), 2)) for _ in range(6)]
    sizes = [[draw.randrange(100) for _ in range(30)] for _ in spans]
    lives = [
        life(script, "server", "ServerApp", *((t, own[t], 0) for t in range(*span)))
        for own, span in zip(sizes, spans, strict=True)
    ]
    brute = max(sum(o[t] for o, (a, b) in zip(sizes, spans, strict=True) if a <= t < b) for t in range(30))
    assert script.together(lives) == brute * 10**6
    assert script.together([]) == 0


def test_cpu_between_two_moments(script):
    old = life(script, "server", "SuperLink", (0, 1, 2.0), (1, 1, 3.0), (2, 1, 3.5), (3, 1, 7.0))
    assert old.cpu(1, 2) == 0.5
    assert old.cpu(0, 10) == 5.0
    new = life(script, "site-0", "ClientApp", (1.5, 1, 0.25), (1.75, 1, 1.25))
    assert (new.cpu(1, 2), new.cpu(0, 1), new.cpu(2, 3)) == (1.25, 0.0, 0.0)


def test_the_relay_passes_all_on_and_counts_each_way(script):
    asked, answer = Random(1).randbytes(700_001), Random(2).randbytes(1_300_003)
    got = []

    def serve():
        with listener.accept()[0] as near:
            got.append(b"".join(iter(lambda: near.recv(1 << 16), b"")))  # until the other end has said all
            near.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        relay = script.Relay(start.free_port(), listener.getsockname()[1])
        try:
            with socket.create_connection(relay.server.getsockname(), timeout=10) as client:
                client.sendall(asked)
                client.shutdown(socket.SHUT_WR)
                back = b"".join(iter(lambda: client.recv(1 << 16), b""))
        finally:
            thread.join(10)
            relay.close()
    assert got == [asked]
    assert back == answer
    assert relay.count() == {"up": len(asked), "down": len(answer)}


@pytest.mark.parametrize("megabytes", [1, 10])
def test_a_wide_net_has_the_size_that_its_name_says(megabytes, script):
    net = f"wide-{megabytes}"
    script.known(net)
    module = nets.build(net, 10, size=32)
    assert sum(p.numel() * 4 for p in module.parameters()) == pytest.approx(megabytes * 1e6, rel=0.01)
    features, logits = module(torch.zeros(2, 3, 32, 32))
    assert (features.shape, logits.shape) == ((2, module.width), (2, 10))


def test_an_app_brings_the_net_that_only_the_script_has(script):
    assert script.code("cct") == ""
    text = submit.APP + script.code("wide-0.5")
    plain = {node.targets[0].id for node in ast.parse(text).body if isinstance(node, ast.Assign)}
    assert {"client", "server"} <= plain  # which Flower looks for in the text
    before = nets.build("cnn", 10)
    assert "wide-0.5" not in nets.NETS
    exec(compile(script.code("wide-0.5"), "app.py", "exec"), {"__name__": "app"})
    theirs = nets.build("wide-0.5", 10).state_dict()
    nets.NETS.pop("wide-0.5")
    script.known("wide-0.5")
    ours = nets.build("wide-0.5", 10).state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in ours)
    assert nets.build("cnn", 10).state_dict().keys() == before.state_dict().keys()


def measured(script, **changes):
    values = {
        "net": "cct",
        "megabytes": 1.0,
        "starting": {"SuperLink answers": 2.0, "submit: accepted": 1.5},
        "idle": {"up": 16_000.0, "down": 3_000.0},
        "lives": [
            life(script, "server", "SuperLink", (0, 100, 1.0), (1, 150, 2.0), (3, 120, 5.0)),
            life(script, "server", "ServerApp", (1, 300, 1.0), (3, 320, 1.0)),
            life(script, "site-0", "ClientApp", (1, 200, 1.0), (2, 210, 3.0)),
            life(script, "site-1", "ClientApp", (1, 250, 2.0), (2, 200, 4.0)),
        ],
        "ends": [1.0, 2.0, 3.0],
        "wire": [{"up": 1, "down": 7}, {"up": 0, "down": 0}, {"up": 4_400_001, "down": 5_000_007}],
        "counted": [
            {"uplink_bytes": 5, "downlink_bytes": 5},
            {},
            {"uplink_bytes": 4_000_005, "downlink_bytes": 4_000_005},
        ],
        "flower": [10.0, 14.0],
        "here": [0.5, 0.5],
        "where": [(1.0, 2.0, 3.0, 4.0, 5.0), (2.0, 2.0, 3.0, 4.0, 5.0)],
        "same": True,
    }
    return script.Measured(**(values | changes))


def cells(text):
    """{first cell: the others} of every table's rows."""
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {tuple(row[:2]) if row[1] in ("up", "down") else row[0]: row[1:] for row in rows if set(row[0]) != {"-"}}


def test_the_record_says_what_was_measured(script):
    text = "\n".join(script.report([measured(script)]))
    found = cells(text)
    assert found["cct (1.0 MB)"] == ["12.00 (10.00 to 14.00)", "0.50 (0.50 to 0.50)", "11.50", "24", "yes"]
    assert found["SuperLink answers"] == ["2.0"]
    assert found["submit: first round done"] == [""]  # never seen
    assert found[("cct (1.0 MB)", "up")][1:] == ["2.000", "2.200", "1.100"]
    assert found[("cct (1.0 MB)", "down")][1:] == ["2.000", "2.500", "1.250"]
    assert found[script.STAGES[0]] == ["1.50"]
    assert found["ClientApp"] == ["2.00"]  # 2 s each of two, over two rounds
    assert found["server: ServerApp"] == ["320 (640)"]
    assert found["server: all together"] == ["450"]
    assert found["node: ClientApp"] == ["250 (500)"]
    assert "16.0 kB up and 3.0 kB down a minute" in text


def test_a_run_that_fails_leaves_its_reason_in_the_record(script):
    good, bad = measured(script), measured(script, net="wide-9", failed="run 7 is finished:failed: its log says why")
    text = "\n".join(script.report([good, bad]))
    assert "wide-9: no round figures, since run 7 is finished:failed: its log says why" in text
    assert cells(text)["SuperLink answers"] == ["2.0", "2.0"]
    assert cells(text)["server: ServerApp"] == ["320 (640)"]
    assert "## A round" not in "\n".join(script.report([bad]))


def test_experiments_differ_in_nothing_but_the_net(script):
    a, b = script.experiment("cct", 3), script.experiment("wide-1", 3)
    assert (a.clients, a.cohort, a.rounds, a.steps, a.evaluate_every) == (script.NODES, script.NODES, 3, 1, 3)
    assert json.dumps(vars(a), default=repr).replace("cct", "wide-1") == json.dumps(vars(b), default=repr)
