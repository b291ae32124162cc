"""A captioner from the Hugging Face hub: the files that `captioning export` writes. Nothing from the hub is run."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from captioning.checkpoint.export import CARD, CONFIG, VOCABULARY, WEIGHTS
from captioning.errors import InputError, one_line
from captioning.files import read_json

_PREFIX = "hf:"
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9])?"
_NAME = re.compile(rf"{_PREFIX}(?P<repository>{_PART}/{_PART})(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_OTHER_MODEL = "no captioner of this project; `captioning export` writes what can be uploaded"


def is_on_hub(name: object) -> bool:
    return isinstance(name, str) and name.startswith(_PREFIX)


def download(name: str) -> Path:
    """Return the folder of an exported captioner, downloaded where the hub's cache lacks it.

    Without a connection, or with ``HF_HUB_OFFLINE=1``, only the cache is used. Only the files of an export are fetched,
    and the configuration first, so that the weights of another kind of model are never downloaded.

    Args:
        name: "hf:owner/name", which may be followed by an "@" and a branch, a tag or a commit.

    Raises:
        InputError: The name is malformed, huggingface_hub is not installed, the hub cannot be reached, or it has no
            captioner of this project under that name.
    """
    match = _NAME.fullmatch(name)
    if match is None or ".." in name or "--" in match["repository"]:
        raise InputError(f"{name}: not a name on the hub; give hf:owner/name, or hf:owner/name@revision")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError as error:
        raise InputError(f"{name}: needs huggingface_hub; pip install -e '.[hub]'") from error

    def fetch(file: str, revision: str | None) -> Path:
        return Path(hf_hub_download(match["repository"], file, revision=revision))

    try:
        config = fetch(CONFIG, match["revision"])
        content = read_json(config)
        if not isinstance(content, dict) or not {"format", "encoder", "decoder", "preprocessing"} <= content.keys():
            raise InputError(f"{name}: {_OTHER_MODEL}")
        commit = config.parent.name  # the same state of the repository for all files
        for file in (VOCABULARY, WEIGHTS):
            fetch(file, commit)
        with contextlib.suppress(EntryNotFoundError):
            fetch(CARD, commit)
    except InputError:
        raise
    except Exception as error:  # the HTTP library's errors are among them
        raise InputError(f"{name}: {_reason(error)}") from error
    return config.parent


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
        return _OTHER_MODEL
    return f"cannot be downloaded ({one_line(error, 160)})"
