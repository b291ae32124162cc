"""The captioner that is installed with the package: an exported folder in captioning/pretrained/."""

from __future__ import annotations

from pathlib import Path

PRETRAINED = "pretrained"
"""The name under which every command and ``load`` take the captioner."""

FOLDER = Path(__file__).parent.parent / "pretrained" / "flickr8k_mobilenet"
