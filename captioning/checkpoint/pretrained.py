"""The captioner that is installed with the package: an exported folder in captioning/pretrained/."""

from __future__ import annotations

from pathlib import Path

from captioning.checkpoint.export import is_export
from captioning.errors import InputError

PRETRAINED = "pretrained"
"""The name under which every command and ``load`` take the captioner."""

FOLDER = Path(__file__).parent.parent / "pretrained" / "flickr8k_mobilenet"


def pretrained_folder() -> Path:
    """Return the folder of the pretrained captioner.

    Raises:
        InputError: This installation lacks it.
    """
    if not is_export(FOLDER):
        raise InputError(
            f"this installation has no pretrained captioner (captioning/pretrained/{FOLDER.name} is missing); "
            "install the whole package, or name a model: a .ckpt file, an exported folder or hf:owner/name"
        )
    return FOLDER
