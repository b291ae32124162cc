"""Errors that the user can correct: one line, exit code 2, no traceback."""

import difflib
import functools
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Collection
from numbers import Integral
from typing import Any, ParamSpec, get_args

from captioning import earlier_names

P = ParamSpec("P")


class InputError(ValueError):
    """A file, option or value that cannot be used. The message is one line: what, where, and what to do."""

    def __init__(self, message: object) -> None:
        # PyTorch raises the error of a data-loading process again, with its traceback in the message.
        text = str(message)
        super().__init__(text.rpartition("InputError: ")[2].strip() if text.startswith("Caught InputError") else text)


def check_whole(low: int, high: float = math.inf, **values: int | None) -> None:
    """Raise InputError if a value is neither None nor a whole number in low .. high."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise InputError(f"{name} must be a whole number, got {value!r}")
    check_range(low, high, **values)


def check_size(**values: int | None) -> None:
    """Raise InputError if a layer has no units, or so many that it would exhaust the memory."""
    check_whole(1, 65_536, **values)


def check_range(low: float, high: float = math.inf, **values: float | None) -> None:
    """Raise InputError if a value is neither None nor a finite number in low .. high."""
    for name, value in values.items():
        if value is not None and not (low <= value <= high and abs(value) < math.inf):
            lower = f"at least {low}" if low > -math.inf else "finite"
            raise InputError(f"{name} must be {lower if high == math.inf else f'in {low} .. {high}'}, got {value}")


def check_choice(choices: Any, **values: object) -> None:
    """Raise InputError if a value is not among the choices, a collection or a ``Literal``."""
    names = get_args(choices) or tuple(choices)
    for name, value in values.items():
        if value not in names:
            problem = f"must be {'one of ' if len(names) > 1 else ''}{', '.join(names)}, got {value!r}"
            raise InputError(f"{name} {problem}{did_you_mean(str(value), names)}")


# C0 and C1 controls, line and paragraph separators, and marks that change the direction of writing.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """Return text as one line for a terminal, with control characters escaped, such as ``\\x1b``."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return the message of another library's error on one line, cut after ``limit`` characters."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


@functools.cache
def warn_once(line: str) -> None:
    """Log a warning, once in a process."""
    logging.getLogger("captioning").warning(line)


_ALSO_CALLED = {"learning_rate": "lr", "epochs": "max_epochs", "steps": "max_steps", "seed": "seed_everything"}
_ALSO_CALLED |= {"gpus": "devices", "gpu": "device", "device": "accelerator", "resume": "ckpt_path"}
"""Names of options in other programs, each with its name in this one."""


def did_you_mean(word: str, words: Collection[str]) -> str:
    """Return ``; did you mean X?`` with the nearest of ``words``, "" if none is near.

    The key behind the last dot decides: ``lr`` finds ``--model.optimizer.lr``. Of several names with this key, the
    nearest to ``word`` wins, or the first if ``word`` is a key alone.
    """
    names_by_key: dict[str, list[str]] = {}
    for name in words:
        names_by_key.setdefault(name.rpartition(".")[2].lstrip("-"), []).append(name)
    *sections, key = word.lstrip("-").split(".")
    matches = [new for old in (*sections, key) if (new := earlier_names.SUGGESTIONS.get(old))]
    for near in difflib.get_close_matches(_ALSO_CALLED.get(key, key), names_by_key, 1):
        matches += difflib.get_close_matches(word, names_by_key[near], 1, 0) if sections else names_by_key[near]
    return f"; did you mean {matches[0]}?" if matches else ""


_REMEDIES = {
    "(?i)allocate memory|MemoryError": "out of memory ({}); lower the batch size, or give smaller images",
    "Too many open files": "too many open files; raise the limit (ulimit -n 65536), or lower num_workers",
    "shared memory|</torch_": "/dev/shm is full ({}); docker run --ipc=host or --shm-size 8g, or --data.num_workers 0",
    r"DataLoader worker \(pid": "a process that loads images died ({}), often for lack of memory; lower num_workers",
}
"""Messages for errors of PyTorch and the system, by a pattern of the error."""


def exits_on_input_error(main: Callable[P, None]) -> Callable[P, None]:
    """Wrap a script's ``main``: an ``InputError``, a failed file or a full memory ends in one line and exit code 2.

    The exit code is 130 after Ctrl-C, and 141 after the reader of a pipe closed it. Other errors keep their traceback.
    """

    @functools.wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            main(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise SystemExit(130) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout at exit, which would raise again
            raise SystemExit(141) from None
        except Exception as error:
            # In an error of a data-loading process, the message is the last line; its traceback stands before.
            kind = type(error).__name__
            message = str(error).strip().rpartition("\n")[2][:200]
            remedies = [remedy for pattern, remedy in _REMEDIES.items() if re.search(pattern, f"{kind}: {message}")]
            if isinstance(error, InputError):
                line = str(error)
            elif isinstance(error, (OSError, RuntimeError, MemoryError)) and remedies:
                line = remedies[0].format(message or kind)
            elif isinstance(error, OSError) and error.errno is not None:
                line = f"{error.filename or 'standard output or a temporary file'}: {error.strerror}"
            else:
                raise
            print(f"error: {printable(line)}", file=sys.stderr)
            raise SystemExit(2) from None

    return wrapped
