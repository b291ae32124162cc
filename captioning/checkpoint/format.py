"""A checkpoint file: whether it is one of this project, and still what was written.

PyTorch's format is a ZIP archive that keeps a CRC-32 of every tensor and of the description of the rest. PyTorch does
not look at them when it reads; here they are the checksums of a checkpoint, which earlier versions wrote as well.
"""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from captioning.errors import InputError, one_line
from captioning.run_folder import RunFolder

CHECKPOINT_FORMAT = 1
"""Counts up whenever a checkpoint's ``["captioning"]`` entry changes so that an older program cannot read it."""

_OF_TRAINING = {
    "epoch": int,
    "global_step": int,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "random_state": dict,
}


def read_checkpoint(path: Path, *, training: bool = False, weights_only: bool = True) -> dict[str, Any]:
    """Return what `captioning fit` saved, on the CPU. No code in the file is run.

    Args:
        training: what training goes on from is wanted too and read in full. By default only the weights are read and
            compared with their checksums; the optimizer's state, two thirds of the file, stays on the disk.
        weights_only: False opens what the user trusts, objects of any kind.

    Raises:
        InputError: the file is missing, damaged, of another project or of a newer version of this one.
    """
    refuse_other_files(path)
    try:
        with zipfile.ZipFile(path) as archive:
            checksums = _checksums(archive)
        checkpoint = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=not training)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path}: not a checkpoint of this project: it holds objects beside weights and plain data, and opening it "
            "could run code; if you made it yourself, `captioning` takes --weights_only false"
        ) from error
    except zipfile.BadZipFile as error:
        raise InputError(f"{path}: damaged: its content is not what was written; {_remedy(path)}") from error
    except Exception as error:  # what PyTorch raises on a damaged file is up to where the damage is
        if "PytorchStreamReader" in str(error):
            raise InputError(f"{path}: damaged: its content is not what was written; {_remedy(path)}") from error
        raise InputError(f"{path}: not a checkpoint, or a damaged one ({one_line(error, 120)})") from error
    content = checkpoint.get("captioning") if isinstance(checkpoint, dict) else None
    if not isinstance(content, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise InputError(f"{path}: not a checkpoint of this project; give one that `captioning fit` wrote")
    check_format(path, content)
    if training:
        for name, kind in _OF_TRAINING.items():
            if name in checkpoint and not isinstance(checkpoint[name], kind):
                raise InputError(f"{path}: its {name} is no {kind.__name__}; it was edited, use another one")
    if checksums:
        _compare(path, checkpoint if training else checkpoint["state_dict"], checksums)
    return checkpoint


def check_format(path: Path, content: Mapping[str, Any]) -> None:
    """Raises:
    InputError: the content of a checkpoint is of a version that there is not, or not yet.
    """
    number = content.get("format")
    if type(number) is not int or number < 1:
        raise InputError(f"{path}: has checkpoint format {number!r}, which there never was; it was edited")
    if number > CHECKPOINT_FORMAT:
        raise InputError(
            f"{path}: has checkpoint format {number}, this version reads up to {CHECKPOINT_FORMAT}; update captioning"
        )


def read_back(path: Path) -> None:
    """Read a file that was just written and compare it with its checksums, from the disk where that can be asked for.

    Raises:
        InputError: what is read is not what was written.
    """
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that it is not read from memory
    if (damaged := damage_of(path)) is not None:
        raise InputError(f"what was read back is not what was written ({damaged}); is the disk sound?")


def damage_of(path: Path) -> str | None:
    """Read a whole checkpoint and return where it is not what was written, None if it is."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() if _checksums(archive) else None
    except Exception as error:  # what zipfile raises on a damaged file is up to where the damage is
        return one_line(error, 80)


def sound_beside(path: Path) -> Path | None:
    """Return the newest checkpoint in the folder of a damaged one that is what was written, None if there is none."""
    others = [other for other in path.parent.glob("*.ckpt") if other != path and other.is_file()]
    newest_first = sorted(others, key=lambda other: other.stat().st_mtime_ns, reverse=True)
    return next((other for other in newest_first if damage_of(other) is None), None)


def refuse_other_files(path: Path) -> None:
    """Look at a file's kind and its first bytes, before anything else is done with it.

    Raises:
        InputError: it is no file, or none that PyTorch wrote.
    """
    if path.is_dir():
        inside = RunFolder(path).checkpoint("best")
        hint = f"give {inside}" if inside.is_file() else "give a .ckpt file in it"
        raise InputError(f"{path}: is a folder; {hint}")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: the checkpoint cannot be read (is no regular file)")
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise InputError(f"{path}: the checkpoint cannot be read ({reason})") from error
    if not _is_archive(path):
        if start == b"PK\x03\x04":
            raise InputError(f"{path}: the end of the checkpoint is missing; {_remedy(path)}")
        other = (
            "one that `captioning fit` wrote" if (found := sound_beside(path)) is None else f"{found}, which is sound"
        )
        raise InputError(f"{path}: not a checkpoint of this project; give {other}")


def _is_archive(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # Python finds the end of one, and something impossible in it
        return False


def _checksums(archive: zipfile.ZipFile) -> frozenset[tuple[int, int]]:
    """Return (CRC-32, bytes) of every tensor, and check what is read before them; none if they were switched off.

    Raises:
        BadZipFile: the description of the content is not what was written.
    """
    entries = archive.infolist()
    if not any(entry.CRC for entry in entries):
        return frozenset()  # torch.serialization.set_crc32_options(False)
    for entry in entries:
        if entry.filename.endswith(("/data.pkl", "/byteorder", "/version")):
            archive.read(entry)
    return frozenset((entry.CRC, entry.file_size) for entry in entries if "/data/" in entry.filename)


def _compare(path: Path, content: Any, checksums: frozenset[tuple[int, int]]) -> None:
    """Refuse tensors whose memory, which is that of the file's records, has none of the checksums in the file."""
    seen: set[int] = set()
    for name, tensor in _tensors(content, ""):
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        if (zlib.crc32(raw.numpy().data), storage.nbytes()) not in checksums:
            raise InputError(f"{path}: damaged: {name} is not what was written; {_remedy(path)}")


def _remedy(path: Path) -> str:
    other = sound_beside(path)
    return "copy it again, or use " + ("another one" if other is None else f"{other}, which is sound")


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.layout is torch.strided:
            yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _tensors(inner, f"{name}.{number}")
