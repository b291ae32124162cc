"""A captioner from the Hugging Face hub: the files that scripts/export.py writes, none that runs."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from captioning.checkpoint.export import CARD, CONFIG, VOCABULARY, WEIGHTS
from captioning.errors import InputError, one_line
from captioning.files import read_json

PREFIX = "hf:"
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9])?"
_NAME = re.compile(rf"{PREFIX}(?P<repository>{_PART}/{_PART})(?:@(?P<revision>[\w./-]+))?", re.ASCII)


def is_on_hub(name: object) -> bool:
    return isinstance(name, str) and name.startswith(PREFIX)


def download(name: str) -> Path:
    """Return the folder of an exported captioner, downloaded where the hub's cache does not have it yet.

    Without a connection, or with ``HF_HUB_OFFLINE=1``, the cache alone is looked into. Only the four files that
    ``captioning.checkpoint.export`` knows are fetched, the configuration first, so that the weights of something else
    never are.

    Args:
        name: "hf:owner/name", and after an "@" a branch, a tag or a commit.

    Raises:
        InputError: the name is malformed, huggingface_hub is not installed, the hub cannot be reached, or there is no
            captioner of this project under that name.
    """
    found = _NAME.fullmatch(name)
    if found is None or ".." in name or "--" in found["repository"]:
        raise InputError(f"{name}: not a name on the hub; give hf:owner/name, or hf:owner/name@revision")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError as error:
        raise InputError(f"{name}: needs huggingface_hub; pip install -e '.[hub]'") from error

    def fetch(file: str, revision: str | None) -> Path:
        return Path(hf_hub_download(found["repository"], file, revision=revision))

    try:
        config = fetch(CONFIG, found["revision"])
        _check(name, config)
        commit = config.parent.name  # all files of one state of the repository
        for file in (VOCABULARY, WEIGHTS):
            fetch(file, commit)
        with contextlib.suppress(EntryNotFoundError):
            fetch(CARD, commit)
    except InputError:
        raise
    except Exception as error:  # those of the HTTP library are among them
        raise InputError(f"{name}: {_reason(error)}") from error
    return config.parent


def _check(name: str, config: Path) -> None:
    content = read_json(config)
    if not isinstance(content, dict) or not {"format", "encoder", "decoder", "preprocessing"} <= content.keys():
        raise InputError(f"{name}: no captioner of this project; scripts/export.py writes what can be uploaded")


def _reason(error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "access is restricted; ask its owner, and log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository, or it is private; if it is yours, log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the repository has no such revision"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "the hub cannot be reached, and the cache does not have it; check the connection"
    if isinstance(error, errors.EntryNotFoundError):
        return "no captioner of this project; scripts/export.py writes what can be uploaded"
    return f"cannot be downloaded ({one_line(error, 160)})"
