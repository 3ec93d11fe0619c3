"""What a person did that cannot work, said in one line with the remedy."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something outside the program is wrong (a file, a value, the network). The command line exits with 1."""


class UsageError(UserError):
    """The words of the command or the config are wrong. The command line exits with 2."""


def unknown(kind: str, name: str, valid: Iterable[str]) -> UsageError:
    """The error for a name that does not exist: the nearest valid ones first, else all of them."""
    valid = sorted(valid)
    near = difflib.get_close_matches(name, valid, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(valid)}"
    return UsageError(f"unknown {kind} '{name}'; {hint}")
