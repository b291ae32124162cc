"""Errors that the user can correct: one line, exit code 2, no traceback."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


class InputError(ValueError):
    """A file, option or value that cannot be used. The message is one line: what, where, and what to do."""


def exits_on_input_error(main: Callable[P, None]) -> Callable[P, None]:
    """Wrap a script's ``main``: an ``InputError`` is printed as one line on stderr and ends with exit code 2.

    Ctrl-C ends with exit code 130 and a word instead of a traceback.
    """

    @functools.wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            main(*args, **kwargs)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise SystemExit(130) from None

    return wrapped
