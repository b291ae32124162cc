"""Command lines of the commands: a typed function becomes a parser, and a mistake becomes one line.

A command is a function that Python code can call, too. Its arguments have the names, types and defaults of its options,
and its docstring is its help: what it does, ``Args:`` with a sentence on each option, and ``Examples:``.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from captioning.errors import InputError, did_you_mean

Command = Callable[..., Any]

OVERRIDES = "overrides"
"""Argument of a command that takes the options which the command does not know: those of `captioning fit`."""


class OneLineErrors:
    """Mixin for a parser of argparse or jsonargparse: an error is an InputError of one line, with what was meant."""

    prog: str
    _option_string_actions: dict[str, Any]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an InputError of one line."""
        if getattr(self, "_inner_parser", False):  # parses the arguments of one class; the outer parser adds the place
            super().error(message, ex)  # type: ignore[misc]
        hint, options = "", [name for name in self._option_string_actions if name.startswith("--")]
        if unknown := re.match(r"unrecognized arguments: ([^\s=]+)", message):
            message, hint = f"{unknown[1]}: no such option", did_you_mean(unknown[1], options)
        elif unknown := re.search(r"class_path '([\w.]+)':\s+Option '(\w+)' is not accepted", message):
            module, _, name = unknown[1].rpartition(".")
            hint = did_you_mean(unknown[2], inspect.signature(getattr(sys.modules[module], name).__init__).parameters)
        elif unknown := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
            hint = did_you_mean(unknown[2], dir(sys.modules[unknown[1]]))
        elif unknown := re.search(r"Expected a dot import path string: (\S+)", message):
            hint = did_you_mean(unknown[1], _class_names())
        elif unknown := re.search(r"Option '(\S+?)' is not accepted", message):
            hint = did_you_mean(unknown[1], [option[2:] for option in options])
        denied = r"Importing '(\S+)' is not allowed, denied by .+? to allow it\."
        message = re.sub(denied, r"\1 is not imported; name its module with --import", message)
        union = r"Does not validate against any.+?Errors:(.+?)Given value type.+?value:"
        message = re.sub(union, r"\1 Got value:", message, flags=re.DOTALL)
        message = re.sub(r"typing.Literal(\[.+?\])", r"one of \1", message).replace("Parser key", "option")
        message = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", message)
        line, see = " ".join(message.split()) + hint, f" (see {self.prog} --help)"
        raise InputError(line.replace(see, "") + see) from ex  # the error may be that of a configuration file


def _class_names() -> set[str]:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("captioning.")]
    return {name for module in modules for name, value in vars(module).items() if isinstance(value, type)}


class Parser(OneLineErrors, argparse.ArgumentParser):
    """The parser of the commands."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """At most 100 columns, and a usage of one line that leaves the options out."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=29, width=min(100, shutil.get_terminal_size().columns))

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        shown = [action for action in actions if action.required or not action.option_strings]
        super().add_usage(f"{self._format_usage(None, shown, [], '').strip()} [options]", actions, groups, prefix)


def parser_of(command: Command, prog: str) -> argparse.ArgumentParser:
    """Return the parser of a command.

    An argument before a ``*`` is given by its place, ``*names`` takes one or more words, a ``bool`` is a flag, a
    ``list`` repeats its option (or, without ``*names``, takes several values), and a ``Literal`` names the choices.

    Args:
        command: The function.
        prog: What its command line begins with, such as "captioning caption".
    """
    parts = re.split(r"\n\n(Args|Returns|Raises|Examples):\n", inspect.getdoc(command) or "")
    texts = dict(zip(["", *parts[1::2]], parts[::2], strict=True))
    sentences = dict(re.findall(r"^    \*?(\w+): (.+(?:\n {8}.+)*)", texts.get("Args", ""), re.MULTILINE))
    examples = (
        f"examples:\n{textwrap.indent(textwrap.dedent(texts['Examples']), '  ')}" if "Examples" in texts else None
    )
    parser = Parser(prog, description=texts[""], epilog=examples, formatter_class=_Help, allow_abbrev=False)
    types = get_type_hints(command)
    parameters = inspect.signature(command).parameters
    has_words = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    for name, parameter in parameters.items():
        if name != OVERRIDES:
            _add(parser, parameter, types[name], " ".join(sentences[name].split()), has_words=has_words)
    return parser


def _add(
    parser: argparse.ArgumentParser, parameter: inspect.Parameter, kind: Any, sentence: str, *, has_words: bool
) -> None:
    """Add the option or the word that gives one argument."""
    options: dict[str, Any] = {}
    if type(None) in get_args(kind):
        kind = next(each for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
        # Several values of one option would swallow a word that stands behind them.
        options = {"action": "append"} if has_words else {"action": "extend", "nargs": "+"}
    if kind is bool:
        options["action"] = "store_true"
    elif get_origin(kind) is Literal:
        options |= {"choices": get_args(kind), "type": type(get_args(kind)[0])}
    else:
        options |= {"type": kind, "metavar": {int: "N", float: "X", Path: "PATH"}.get(kind, parameter.name.upper())}
    default = parameter.default
    if parameter.kind is not parameter.KEYWORD_ONLY:
        nargs = "+" if parameter.kind is parameter.VAR_POSITIONAL else None
        parser.add_argument(parameter.name, nargs=nargs, help=sentence, **options)
        return
    if default not in (None, False, parameter.empty, ()):
        sentence += f" Default: {default}."
    required = default is parameter.empty
    default = None if required or "action" in options else default  # argparse would append to a default
    parser.add_argument(f"--{parameter.name}", required=required, default=default, help=sentence, **options)


def call(prog: str, command: Command | Mapping[str, Command], args: Sequence[str]) -> None:
    """Call a command with the words of a command line.

    Args:
        prog: What the command line begins with, such as "captioning caption".
        command: The function, or several by the word that chooses one.
        args: The other words.

    Raises:
        InputError: A word cannot be used, or the command refuses something.
    """
    if isinstance(command, Mapping):
        if not args or args[0] in ("-h", "--help"):
            width = max(map(len, command))
            print(f"usage: {prog} {'|'.join(command)} [options]\n")
            for name, function in command.items():
                print(f"  {name:<{width}}  {(inspect.getdoc(function) or '').partition(chr(10))[0]}")
        elif args[0] in command:
            call(f"{prog} {args[0]}", command[args[0]], args[1:])
        else:
            raise InputError(f"{prog} {args[0]}: no such command{did_you_mean(args[0], command)}")
        return
    parser = parser_of(command, prog)
    parameters = inspect.signature(command).parameters
    known = parser._option_string_actions
    unknown = [word for word in args if word.startswith("--") and word.partition("=")[0] not in known]
    if unknown and OVERRIDES not in parameters:
        parser.error(f"unrecognized arguments: {unknown[0]}")
    values, others = parser.parse_known_args(args)
    given = {name: value for name, value in vars(values).items() if value is not None}
    if OVERRIDES in parameters:
        given[OVERRIDES] = others
    elif others:
        parser.error(f"unrecognized arguments: {others[0]}")
    several = [name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_POSITIONAL]
    words = [word for name in several for word in given.pop(name)]
    command(*words, **given)
