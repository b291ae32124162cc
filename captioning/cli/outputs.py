"""Files that a command writes: one rule for all of them, which the parser applies before work starts.

An option that names such a file has the type ``OutputFile``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from captioning.errors import InputError
from captioning.files import errors_named, refuse_inputs
from captioning.run_folder import RunFolder

STDOUT = Path("-")


class OutputFile:
    """The type of an option that names a file to write.

    Args:
        kind: What is written, as in ``refuse_output``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, text: str) -> Path:
        return Path(text)


def refuse_outputs(outputs: list[tuple[str, Path, str]], words: list[str]) -> None:
    """Refuse outputs (option, file, kind) as ``refuse_output`` does; every other word may name an input."""
    inputs = [word.partition("=")[2] if word.startswith("-") else word for word in words]
    for option, path, _ in outputs:
        if sum(os.path.realpath(other) == os.path.realpath(path) for _, other, _ in outputs) > 1:
            raise InputError(f"{option} {path}: is the file of two options; give another name")
        given = [name for name in inputs if name and os.path.realpath(name) == os.path.realpath(path)]
        if given:
            inputs.remove(given[0])
    for option, path, kind in outputs:
        refuse_output(path, option, kind, [name for name in inputs if name])


_BEGINNINGS = {"JSON": (b"{", b"["), "HTML": (b"<",), "checkpoint": (b"PK",), "": ()}
"""The first bytes of files of the kinds that commands write; "" is a kind that is not recognised by them."""


def refuse_output(output: Path, option: str, kind: str, inputs: Iterable[str | Path] = ()) -> None:
    """Refuse a file to write that would replace an input, a file of a run, or something of another kind.

    Args:
        output: The file, which need not exist.
        option: The option of the command line that names it.
        kind: What is written: "JSON", "HTML", "checkpoint", or "" for anything else.
        inputs: Files that are read.

    Raises:
        InputError: Says what would be replaced.
    """
    refuse_inputs(output, inputs, option)
    if kind and output.is_dir():
        raise InputError(f"{option} {output}: is a folder; give a file")
    if not output.is_file():
        return  # a device, a pipe or a folder: where it is written
    if (run := RunFolder.around(output)) is not None:
        raise InputError(f"{option} {output}: would replace a file of the run {run.path}; give another name")
    with errors_named(output, option), output.open("rb") as file:
        beginning = file.read(256).lstrip()
    if beginning and _BEGINNINGS[kind] and not beginning.startswith(_BEGINNINGS[kind]):
        raise InputError(f"{option} {output}: would replace a file that is no {kind}; give another name")
