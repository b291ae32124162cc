"""Building objects from keys of a training configuration."""

import contextlib
import functools
import itertools
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from captioning.cli import FIT_HELP, IMPORTED_MODULES
from captioning.cli.parser import parser_error
from captioning.errors import InputError
from captioning.settings import nest, yaml_loader


def restrict_imports() -> None:
    """Let settings name classes only of this package, PyTorch, Lightning, and the modules of ``--import``."""
    yaml_loader()  # makes jsonargparse use it
    allowed = ["captioning", "torch.optim", "torch.nn", "pytorch_lightning", "lightning_fabric", *IMPORTED_MODULES]
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=allowed)


def parse_training(parser: ArgumentParser, args: Sequence[str]) -> Namespace:
    """Return the settings, in which options win over configurations. Raises InputError, with a suggestion."""
    pairs = itertools.pairwise(["", *args])
    is_config = [bool({"-c", "--config"} & {before, word.partition("=")[0]}) for before, word in pairs]
    try:
        options = [word for word, of_config in zip(args, is_config, strict=True) if not of_config]
        return parser.parse_args([*itertools.compress(args, is_config), *options])
    except ArgumentError as error:
        raise parser_error("captioning fit", str(error), FIT_HELP + parser.format_help()) from error


def build(
    types: Mapping[str, Any], configs: Iterable[Mapping[str, Any]], options: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the objects at the keys of ``types`` ({"data.source": CaptionSource}), and their settings as nested dicts.

    A key whose type admits None may be missing. A later configuration wins over an earlier one, and options of the
    training command, ``["--data.source.root", "DIR"]``, win over all configurations.
    """
    restrict_imports()
    parser = ArgumentParser(prog="captioning fit", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action=ActionConfigFile)
    for key, value_type in types.items():
        parser.add_argument(f"--{key}", type=value_type, required=type(None) not in get_args(value_type))
    arguments = []
    for config in configs:
        nested: Any = nest(config, {})
        values = {}
        for key in types:
            with contextlib.suppress(KeyError, TypeError):  # the key is missing, or a section above it is null
                values[key] = functools.reduce(operator.getitem, key.split("."), nested)
        arguments += ["--config", json.dumps(values, default=str)]
    settings = parse_training(parser, [*arguments, *options])
    try:
        built = parser.instantiate(settings)
    except (TypeError, ValueError) as error:  # an argument that its class refuses
        raise error if isinstance(error, InputError) else InputError(f"{', '.join(types)}: {error}") from error
    return {key: built[key] for key in types}, settings.as_dict()
