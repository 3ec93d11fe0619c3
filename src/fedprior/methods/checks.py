"""Bounds of the methods' own keys."""

from ..errors import UsageError


def at_least(least: float, **values: float) -> None:
    """Raises UsageError for a value that is smaller, infinite or not a number."""
    for key, value in values.items():
        if not least <= value < float("inf"):
            raise UsageError(f"method.{key} must be a number of at least {least:g}, not {value}")


def above_zero(**values: float) -> None:
    """Raises UsageError for a value that is not positive and finite."""
    for key, value in values.items():
        if not 0 < value < float("inf"):
            raise UsageError(f"method.{key} must be a number above 0, not {value}")
