"""Files and a card on the Hugging Face hub, as a data set or a model."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Self

from .errors import UsageError, UserError
from .progress import clean


class File(NamedTuple):
    """One file of a repository."""

    name: str  # within the repository
    content: Path | bytes
    bytes: int

    @classmethod
    def of(cls, name: str, text: str) -> Self:
        """A file that holds a text."""
        data = text.encode()
        return cls(name, data, len(data))


def check_name(repository: str, where: str = "--push") -> None:
    """Raises UsageError for what is no user/name."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise UsageError(f"{where} wants user/name, not '{repository}'")


def check_license(license: str) -> None:
    """Raises UsageError for what cannot be one of the hub's words for licences, which are a list that only the hub has:
    small letters, digits, dots, plus signs and hyphens."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise UsageError(
            "--license wants the hub's word for a licence, such as apache-2.0, cc-by-4.0, mit or other, not "
            f"'{clean(license)}'"
        )


def upload(
    repository: str,
    kind: Literal["dataset", "model"],
    files: Sequence[File],
    card: str,
    message: str,
    *,
    private: bool,
    kept: str,
) -> str:
    """Uploads files and the card as README.md in one commit; -> the address. What is there already and unchanged is not
    sent again.

    Raises UserError without a login, without a network, or where the hub refuses; it ends with `kept`.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    operations = [CommitOperationAdd(file.name, file.content) for file in [File.of("README.md", card), *files]]
    try:
        api.create_repo(repository, repo_type=kind, private=private, exist_ok=True)
        made = api.create_commit(repository, operations, commit_message=message, repo_type=kind)
    except Exception as error:  # every layer of the client has its own kinds, and the remedy is the same for all
        reason = str(error).strip().partition("\n")[0][:200].rstrip(".") or type(error).__name__
        raise UserError(
            f"cannot push to {repository} ({reason}); log in with `hf auth login`, check the name and the network. "
            f"{kept}"
        ) from None
    return str(made.repo_url)
