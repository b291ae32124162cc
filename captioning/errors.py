"""Errors that the user can correct: one line, exit code 2, no traceback."""

from __future__ import annotations

import difflib
import functools
import io
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection
from numbers import Integral
from typing import ParamSpec

P = ParamSpec("P")

DEBUG = "--debug"
"""Option of every command: show the traceback of an error."""

_SHOWN = 60  # characters of a value in a message


class InputError(ValueError):
    """A file, option or value that cannot be used. The message is one line: what, where, and what to do."""


def check_whole(low: int, high: float = math.inf, **values: int | None) -> None:
    """Refuse values that are not whole numbers in low .. high. None is a value that is not set.

    Raises:
        InputError: Names the value.
    """
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise InputError(f"{name} must be a whole number, got {value!r}")
    check_range(low, high, **values)


def check_range(low: float, high: float = math.inf, **values: float | None) -> None:
    """Refuse numbers that are outside low .. high, NaN or infinite. None is a value that is not set.

    Raises:
        InputError: Names the value.
    """
    for name, value in values.items():
        if value is not None and not (low <= value <= high and abs(value) < math.inf):
            lower = f"at least {low}" if low > -math.inf else "finite"
            expected = lower if high == math.inf else f"in {low} .. {high}"
            raise InputError(f"{name} must be {expected}, got {shortened(value)}")


# C0 and C1 controls, line and paragraph separators, and marks that change the direction of writing.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """Return text as one line for a terminal, with control characters escaped, such as ``\\x1b``."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def shortened(value: object) -> str:
    """Return a value as it is printed in a message; of a long one, the beginning and "..", as for 10**400."""
    try:
        text = str(value)
    except ValueError:  # Python prints no numbers of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} .."


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return the message of another library's error on one line, cut after ``limit`` characters."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def did_you_mean(word: str, words: Collection[str]) -> str:
    """Return ``; did you mean X?`` with the nearest of ``words``, "" if none is near."""
    near = difflib.get_close_matches(word, words, 1)
    return f"; did you mean {near[0]}?" if near else ""


def exits_on_input_error(main: Callable[P, None]) -> Callable[P, None]:
    """Wrap a script's ``main``: an ``InputError`` is printed as one line on stderr and ends with exit code 2.

    So do errors of the operating system, such as a full disk, and running out of memory. Ctrl-C ends with exit code
    130, and an output that is closed with 141, as in other programs. ``--debug`` anywhere on the command line shows the
    traceback first. Other errors are faults of this package, and keep their traceback. Characters that the terminal's
    encoding lacks are printed as ``\\u732b``.
    """

    @functools.wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        debug = DEBUG in sys.argv[1:]
        sys.argv[1:] = [arg for arg in sys.argv[1:] if arg != DEBUG]
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            try:
                main(*args, **kwargs)
            finally:
                _flush_stdout()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise SystemExit(130) from None
        except BrokenPipeError:
            # Python flushes stdout once more at exit, which would raise again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise SystemExit(141) from None
        except Exception as error:
            line = _of_the_user(error)
            if line is None:
                raise
            if debug:
                traceback.print_exc()
            print(f"error: {printable(line)}", file=sys.stderr)
            raise SystemExit(2) from None

    return wrapped


def _flush_stdout() -> None:
    """Write what is printed so far. Python would do so at exit, where an error is no longer one line.

    Raises:
        InputError: It cannot be written, as to a full disk.
        BrokenPipeError: Nobody reads it.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the flush at exit would fail, too
        raise InputError(f"standard output: cannot be written ({error.strerror})") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is that of too little memory: Python's, PyTorch's of the processor, or that of a GPU."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, (OSError, RuntimeError)) and re.search(_NO_MEMORY, str(error)) is not None)
    )


_NO_MEMORY = "(?i)can't allocate memory|cannot allocate memory|not enough memory"


def _of_the_user(error: Exception) -> str | None:
    """Return the message for the user; None for a fault of this package."""
    if isinstance(error, InputError):
        return str(error)
    if is_out_of_memory(error):
        return f"out of memory ({one_line(error)}); lower batch_size or eval_batch_size, or give smaller images"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or 'standard output or a temporary file'}: {error.strerror}"
    return None
