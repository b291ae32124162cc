"""A captioner from the Hugging Face hub: the files that `captioning export` writes. Nothing from the hub is run."""

from __future__ import annotations

from pathlib import Path

from captioning.checkpoint.export import CONFIG, VOCABULARY, WEIGHTS
from captioning.errors import InputError, one_line
from captioning.files import read_json

_PREFIX = "hf:"


def is_on_hub(name: object) -> bool:
    return isinstance(name, str) and name.startswith(_PREFIX)


def download(name: str) -> Path:
    """Return the folder of an exported captioner, downloaded where the hub's cache lacks it.

    Without a connection, or with ``HF_HUB_OFFLINE=1``, only the cache is used. The configuration is fetched first, so
    that the weights of another kind of model are never downloaded.

    Args:
        name: "hf:owner/name", which may be followed by an "@" and a branch, a tag or a commit.

    Raises:
        InputError: huggingface_hub is not installed, the hub cannot be reached, or it has no captioner of this project
            under that name.
    """
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise InputError(f"{name}: needs huggingface_hub; pip install -e '.[hub]'") from error

    repository, _, revision = name.removeprefix(_PREFIX).partition("@")
    try:
        config = Path(hf_hub_download(repository, CONFIG, revision=revision or None))
        if not {"encoder", "decoder"} <= set(read_json(config)):
            raise InputError("no captioner of this project; `captioning export` writes what can be uploaded")
        for file in (VOCABULARY, WEIGHTS):
            hf_hub_download(repository, file, revision=config.parent.name)  # the commit: one state of all files
    except Exception as error:  # the HTTP library's errors are among them
        raise InputError(f"{name}: {one_line(error)}") from error
    return config.parent
