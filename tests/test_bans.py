"""What no module may do, read from the source: run code that came with data, or reach for flwr outside its modules."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fedprior"
PIPES = {SOURCE / "engines" / name for name in ("pool.py", "process.py")}  # a run and the children that it started
CARRIER = {SOURCE / "engines" / "flower.py", SOURCE / "deploy" / "registry.py"}  # messages; node keys
PICKLERS = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def modules(node):
    """What an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def sins(path, text):
    """(line, what) of everything in a module's text that is banned."""
    for node in ast.walk(ast.parse(text)):
        for name in modules(node):
            root = name.partition(".")[0]
            if root in PICKLERS and path not in PIPES:
                yield node.lineno, f"import {root}"
            if root == "flwr" and path not in CARRIER:
                yield node.lineno, "import flwr"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "os.system"):
                yield node.lineno, called
            for word in node.keywords:
                said = f"{word.arg}={ast.unparse(word.value)}"
                if said in ("allow_pickle=True", "trust_remote_code=True", "shell=True", "weights_only=False"):
                    yield node.lineno, said


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_no_module_does_what_is_banned(path):
    assert list(sins(path, path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import flwr.app",
        "from flwr.app import Message",
        "def f():\n    import dill",
        "eval('1')",
        "torch.load(p)",
        "np.load(p, allow_pickle=True)",
        "load(p, trust_remote_code=True)",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_what_is_banned_is_found(text):
    assert len(list(sins(SOURCE / "some.py", text))) == 1
