"""The ``captioning`` command. Help is answered here, because importing what training needs takes seconds."""

from __future__ import annotations

import importlib
import inspect
import sys

from captioning.cli.usage import COMMANDS, HELP, TOOLS, command_help, first_line, footnotes
from captioning.errors import exits_on_input_error

_ALL = "--help_all"


@exits_on_input_error
def main() -> None:
    """Run the subcommand that the command line names."""
    if len(sys.argv) > 1 and sys.argv[1] in TOOLS:
        tool = importlib.import_module(f"captioning.cli.{sys.argv[1]}")
        inspect.unwrap(tool.main)(sys.argv[2:])  # errors are handled here
    else:
        _main()


def _main() -> None:
    args = sys.argv[1:]
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP)
        return
    if args[0] == "--version":
        from captioning import __version__

        print(f"captioning {__version__}")
        return
    if args[0] in COMMANDS and {"-h", "--help"} & set(args):
        print(command_help(args[0]))
        return
    line = first_line(args)
    print(line, file=sys.stderr, flush=True)  # standard output may be a file: --print_config > config.yaml
    from captioning.cli.fit import main as run

    with footnotes():
        run(["--help" if arg == _ALL else arg for arg in args])


if __name__ == "__main__":
    main()
