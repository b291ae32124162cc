"""The command lines: typed functions become parsers, their docstrings the help, and mistakes one line."""

import argparse
import functools
import inspect
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import docstring_parser

from captioning.cli import announce
from captioning.errors import InputError, did_you_mean

Command = Callable[..., Any]

OVERRIDES = "overrides"
"""Name of a command's argument for options of `captioning fit` that the command itself does not have."""

_FIELD = inspect.Parameter("field", inspect.Parameter.KEYWORD_ONLY, default=None)  # a field's default is not shown


def parser_error(prog: str, message: str, help_text: str) -> InputError:
    """Return a parser's error as one line, with a suggestion from the options and the example in the parser's help."""
    options = re.findall(r"--[\w.]+", help_text)
    example = re.search(r"examples?:\n +(.+?)(?:   |\n|$)", help_text)
    hint = ""
    if "are required: " in message and example is not None:
        hint = f", as in {example[1]}"
    elif match := re.search(r"(?:unrecognized arguments: |Option ')(?:--)?([\w.]+)", message):
        option = f"--{match[1]}"
        hint = "; captioning fit has it" if option in options else did_you_mean(option, options)
    elif "import path denylist" in message:
        message, hint = message.partition(". Add the import path")[0], "; name its module by --import"
    return InputError(f"{' '.join(message.split())}{hint} (see {prog} --help)")


class CommandParser(argparse.ArgumentParser):
    """The parser of all commands but fit."""

    def error(self, message: str) -> NoReturn:
        raise parser_error(self.prog, message, self.format_help())


def command_parser(command: Command, prog: str) -> argparse.ArgumentParser:
    """Return the parser of a command; ``prog`` is the start of its command line, such as "captioning caption".

    Arguments before ``*`` are positional, and ``*names`` takes one or more words. A ``bool`` is a flag, a ``bool`` that
    may be None takes ``true`` or ``false``. A ``list`` is an option that may be repeated; in a command without
    ``*names`` it also takes several values. A ``Literal`` has choices. ``**names: Annotated[Any, D]`` are the
    documented fields of the dataclass D. An argument that the docstring does not describe has no option. jsonargparse,
    which parses `fit`, would ignore ``*names`` and take longer to import.
    """
    docstring = docstring_parser.parse(inspect.getdoc(command) or "")
    lines = (docstring.examples[0].description or "").splitlines() if docstring.examples else []
    lines = [f"  {line}" for line in lines if line.startswith(prog)]  # two commands may share a docstring
    epilog = "\n".join(["examples:", *lines]) if lines else None
    width = min(100, shutil.get_terminal_size().columns)
    layout = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=29, width=width)
    texts: dict[str, Any] = {"description": docstring.description, "epilog": epilog, "formatter_class": layout}
    parser = CommandParser(prog, **texts, allow_abbrev=False)
    parser.argument_default = argparse.SUPPRESS  # the function has the defaults
    hints, parameters = get_type_hints(command, include_extras=True), inspect.signature(command).parameters
    has_words = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    usage, arguments = [prog], docstring.params
    if arguments and arguments[-1].arg_name.startswith("**"):
        _, group = get_args(hints[arguments.pop().arg_name[2:]])
        hints |= get_type_hints(group)
        for cls in reversed(group.__mro__):
            arguments += docstring_parser.parse(cls.__doc__ or "").params
    for argument in arguments:
        name = argument.arg_name.lstrip("*")
        hint, parameter = hints[name], parameters.get(name, _FIELD)
        options: dict[str, Any] = {"help": " ".join((argument.description or "").split())}
        if type(None) in get_args(hint):
            hint = get_args(hint)[0]
        if get_origin(hint) is list:
            (hint,) = get_args(hint)
            # An option with several values would take the words after it.
            options |= {"action": "extend", "nargs": 1 if has_words else "+"}
        if hint is bool and parameter.default is None:
            options |= {"type": _boolean, "metavar": "true|false"}
        elif hint is bool:
            options["action"] = "store_true"
        elif get_origin(hint) is Literal:
            options |= {"choices": get_args(hint), "type": type(get_args(hint)[0])}
        else:
            options |= {"type": hint, "metavar": {int: "N", float: "X", Path: "PATH"}.get(hint, name.upper())}
        if hint is not bool and parameter.default not in (None, parameter.empty):
            options["help"] += f" Default: {parameter.default}."
        if parameter.kind is parameter.KEYWORD_ONLY:
            name, options["required"] = f"--{name}", parameter.default is parameter.empty
        elif parameter.kind is parameter.VAR_POSITIONAL:
            options["nargs"] = "+"
        action = parser.add_argument(name, **options)
        value = f"{action.metavar} [{action.metavar} ...]" if action.nargs == "+" else str(action.metavar)
        if action.required:
            usage += [*action.option_strings, value]
    parser.usage = " ".join([*usage, "[options]"])
    return parser


def _boolean(word: str) -> bool:
    if word not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {word!r}")
    return word == "true"


def run_command(prog: str, command: Command | Mapping[str, Command], args: Sequence[str], **fixed: Any) -> None:
    """Run a command with the words of a command line. If there are several commands, the first word names one.

    ``fixed`` are arguments without an option.
    """
    if isinstance(command, Mapping):
        _run_one_of(prog, command, args)
        return
    parser = command_parser(command, prog)
    parameters = inspect.signature(command).parameters
    # argparse would take an --option=value with a space for a value.
    pairs = (word.split("=", 1) if word.startswith("--") and " " in word else [word] for word in args)
    values, unknown = parser.parse_known_args([word for pair in pairs for word in pair])
    if unknown and OVERRIDES not in parameters:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments = vars(values) | ({OVERRIDES: unknown} if unknown else {}) | fixed
    positional = [name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_POSITIONAL]
    announce(prog)
    command(*(arguments.pop(positional[0]) if positional else ()), **arguments)


def _run_one_of(prog: str, commands: Mapping[str, Command], args: Sequence[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        print(f"usage: {prog} {'|'.join(commands)} [options]\n")
        for name, command in commands.items():
            print(f"  {name:<{max(map(len, commands))}}  {(inspect.getdoc(command) or '').partition(chr(10))[0]}")
    elif args[0] in commands:
        run_command(f"{prog} {args[0]}", commands[args[0]], args[1:])
    else:
        raise InputError(f"{prog} {args[0]}: no such command{did_you_mean(args[0], commands)}")
