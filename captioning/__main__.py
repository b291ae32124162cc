"""The ``captioning`` command. Help is answered here, because importing what training needs takes seconds."""

from __future__ import annotations

import sys

from captioning.cli.usage import COMMANDS, HELP, command_help, first_line
from captioning.errors import exits_on_input_error

_ALL = "--help_all"


@exits_on_input_error
def main() -> None:
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

    run(["--help" if arg == _ALL else arg for arg in args])


if __name__ == "__main__":
    main()
