"""YAML files of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from captioning.errors import InputError, one_line


def read_config(path: Path, option: str = "") -> dict[str, Any]:
    """Read a file of settings with jsonargparse's rules, by which 1e-3 is a number.

    Args:
        path: The file.
        option: The option of the command line that named the file.

    Raises:
        InputError: The file cannot be read, or is not a mapping of settings.
    """
    try:
        content = get_loader("yaml")(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise InputError(f"{option} {path}: cannot be read ({error.strerror})".lstrip()) from error
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"{option} {path}: not a YAML file ({one_line(error, 120)})".lstrip()) from error
    if not isinstance(content, dict):
        raise InputError(f"{option} {path}: not a configuration, which is a mapping of settings".lstrip())
    return content
