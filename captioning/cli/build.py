"""Building objects from parts of a training configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

from captioning.cli import IMPORTED
from captioning.cli.parser import OneLineErrors
from captioning.errors import InputError
from captioning.settings import install_yaml_loader


def restrict_imports() -> None:
    """Let settings name classes only of this package, PyTorch, Lightning, and the modules of ``--import``."""
    install_yaml_loader()
    allowed = ["captioning", "torch.optim", "torch.nn", "pytorch_lightning", "lightning_fabric", *IMPORTED]
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=allowed)


class PartsParser(OneLineErrors, ArgumentParser):
    """The parser of some parts of a configuration."""


def build(kinds: Mapping[str, Any], configs: Iterable[Mapping[str, Any]], options: Sequence[str] = ()) -> list[Any]:
    """Build the parts of training configurations with the types ``kinds``, such as ``{"data.source": CaptionSource}``.

    A part whose type admits None may be missing. A later configuration wins over an earlier one, and options of the
    training command, ``["--data.source.root", "DIR"]``, win over all configurations.
    """
    restrict_imports()
    parser = PartsParser(prog="captioning fit", allow_abbrev=False)
    parser.settings = configs = [*configs]
    parser.add_argument("--config", action=ActionConfigFile)
    for key, kind in kinds.items():
        parser.add_argument(f"--{key}", type=kind, required=type(None) not in get_args(kind))
    arguments = []
    for config in configs:
        parts = {key: part for key in kinds if (part := _part(key, config)) is not None}
        arguments += ["--config", json.dumps(parts, default=str)]
    settings = parser.parse_args([*arguments, *options])
    try:
        built = parser.instantiate(settings)
    except (TypeError, ValueError) as error:  # an argument that its class refuses
        raise error if isinstance(error, InputError) else InputError(f"{', '.join(kinds)}: {error}") from error
    return [built[key] for key in kinds]


def _part(key: str, config: Any) -> Any:
    """Return the part of a configuration at a dotted key; None if it is missing."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config
