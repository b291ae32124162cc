"""Objects that parts of a training configuration describe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

from captioning.cli import IMPORTED
from captioning.cli.parser import OneLineErrors
from captioning.errors import InputError
from captioning.files import settings_loader


def restrict_imports() -> None:
    """Let settings name classes of this package, of PyTorch and Lightning, and of modules that ``--import`` named.

    A module that a file of settings names is not imported otherwise.
    """
    settings_loader()
    known = ["captioning", "torch.optim", "torch.nn", "pytorch_lightning", "lightning_fabric", *IMPORTED]
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=known)


class _Parser(OneLineErrors, ArgumentParser):
    pass


def build(
    kinds: Mapping[str, Any],
    configs: Iterable[Mapping[str, Any]],
    options: Sequence[str] = (),
    grouped: Sequence[str] = (),
) -> list[Any]:
    """Build the parts of training configurations that are named as in ``{"data.source": CaptionSource}``.

    A part whose type admits None may be missing. Later configurations win over earlier ones, and options of the
    training command, ``["--data.source.root", "DIR"]``, over both. The settings of a ``grouped`` part are the arguments
    of that one class, without ``class_path``.
    """
    restrict_imports()
    parser = _Parser(prog="captioning fit", allow_abbrev=False)
    parser.settings = configs = [*configs]
    parser.add_argument("--config", action=ActionConfigFile)
    for place, kind in kinds.items():
        if place in grouped:
            parser.add_class_arguments(kind, place)
        else:
            parser.add_argument(f"--{place}", type=kind, required=type(None) not in get_args(kind))
    arguments = []
    for config in configs:
        parts = {place: part for place in kinds if (part := _at(place, config)) is not None}
        arguments += ["--config", json.dumps(parts, default=str)]
    settings = parser.parse_args([*arguments, *options])
    try:
        built = parser.instantiate(settings)
    except (TypeError, ValueError) as error:  # an argument that its class refuses
        raise error if isinstance(error, InputError) else InputError(f"{', '.join(kinds)}: {error}") from error
    return [built[place] for place in kinds]


def _at(place: str, config: Any) -> Any:
    for name in place.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config
