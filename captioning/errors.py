"""Errors that the user can correct: one line, exit code 2, no traceback."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


class InputError(ValueError):
    """A file, option or value that cannot be used. The message is one line: what, where, and what to do."""


# C0 and C1 controls, line and paragraph separators, and what turns the direction of writing.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: object) -> str:
    """Return text for a terminal, one line: control characters of a file are shown, ``\\x1b``, not obeyed."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def exits_on_input_error(main: Callable[P, None]) -> Callable[P, None]:
    """Wrap a script's ``main``: an ``InputError`` is printed as one line on stderr and ends with exit code 2.

    Ctrl-C ends with exit code 130 and a word instead of a traceback.
    """

    @functools.wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            main(*args, **kwargs)
        except InputError as error:
            print(f"error: {printable(error)}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise SystemExit(130) from None

    return wrapped
