"""Checkpoint files: written such that a crash leaves the old file or the new one, and checked when they are read.

PyTorch's format is a ZIP archive that keeps a CRC-32 of every tensor and of the description of the rest. PyTorch does
not compare them when it reads a file; this module does.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from captioning.checkpoint.budget import refuse_impossible_counts, refuse_inflated_archive, refuse_inflated_values
from captioning.checkpoint.format import check_format
from captioning.errors import InputError, is_out_of_memory, one_line
from captioning.files import is_lfs_pointer, replacing
from captioning.run_folder import RunFolder

_TRAINING_STATE = {
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
        path: The checkpoint.
        training: Also read the state that training resumes from, and compare everything with its checksums. By default
            only the weights are read; the optimizer's state, two thirds of the file, stays on the disk.
        weights_only: False opens a file that the user trusts, with objects of any kind.

    Raises:
        InputError: The file is missing, damaged, of another project or of a newer version of this one.
    """
    refuse_other_files(path)
    try:
        with zipfile.ZipFile(path) as archive:
            refuse_inflated_archive(path, archive)
            checksums = _checksums(archive)
        checkpoint = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=not training)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path}: not a checkpoint of this project: it holds objects beside weights and plain data, and opening it "
            "could run code; if you made it yourself, `captioning` takes --weights_only false"
        ) from error
    except InputError:
        raise
    except Exception as error:  # a damaged file makes PyTorch raise errors of many types
        if is_out_of_memory(error):
            raise
        if isinstance(error, zipfile.BadZipFile) or "PytorchStreamReader" in str(error):
            raise InputError(f"{path}: damaged: its content is not what was written; {_remedy(path)}") from error
        raise InputError(f"{path}: not a checkpoint, or a damaged one ({one_line(error, 120)})") from error
    content = checkpoint.get("captioning") if isinstance(checkpoint, dict) else None
    if not isinstance(content, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise InputError(f"{path}: not a checkpoint of this project; give one that `captioning fit` wrote")
    check_format(path, content)
    refuse_inflated_values(path, checkpoint)
    if training:
        refuse_other_state(path, checkpoint)
    if checksums:
        _compare(path, checkpoint if training else checkpoint["state_dict"], checksums)
    if training:
        _keep_neighbours(path, checkpoint.get("callbacks", {}))
    return checkpoint


def refuse_other_state(path: Path, checkpoint: dict[str, Any]) -> None:
    """Refuse a state of training whose parts are of other types, or count what no run counts.

    Raises:
        InputError: Names the part.
    """
    for name in ("epoch", "global_step", "loops"):
        refuse_impossible_counts(path, checkpoint.get(name, 0), name)
    for name, kind in _TRAINING_STATE.items():
        if name in checkpoint and not isinstance(checkpoint[name], kind):
            raise InputError(f"{path}: its {name} is no {kind.__name__}; it was edited, use another one")


def write_checkpoint(checkpoint: dict[str, Any], path: Path, *, follow: bool = True) -> None:
    """Write a checkpoint under a temporary name, read it back, and then give it its name.

    Args:
        checkpoint: Its content.
        path: The file.
        follow: As in ``replacing``.

    Raises:
        InputError: The disk is full, the folder cannot be written to, or the file that is read back differs. A file
            that had the name before is unchanged.
    """
    kept = "; the one before is kept" if path.is_file() else ""
    content = io.BytesIO()
    torch.save(checkpoint, content)
    try:
        with replacing(path, follow=follow) as part:
            part.write_bytes(content.getbuffer())
            if (damage := _damage_on_disk(part)) is not None:
                raise InputError(f"{path}: what was read back is not what was written ({damage}); is the disk sound?")
    except InputError as error:
        raise InputError(f"{error}{kept}") from error


def damage_of(path: Path) -> str | None:
    """Read a whole checkpoint and return where it is damaged, None if it is sound."""
    try:
        with zipfile.ZipFile(path) as archive:
            refuse_inflated_archive(path, archive)
            return archive.testzip() if _checksums(archive) else None
    except Exception as error:  # a damaged file makes zipfile raise errors of many types
        if is_out_of_memory(error):
            raise
        return one_line(error, 200)


def _damage_on_disk(path: Path) -> str | None:
    """Return ``damage_of`` a file that was just written, read from the disk where the system can be told to."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # drops the copy in memory
    return damage_of(path)


def sound_beside(path: Path) -> Path | None:
    """Return the newest sound checkpoint in the folder of a damaged one, None if there is none."""
    checkpoints = [file for file in path.parent.glob("*.ckpt") if file != path and file.is_file()]
    newest_first = sorted(checkpoints, key=lambda file: file.stat().st_mtime_ns, reverse=True)
    return next((file for file in newest_first if damage_of(file) is None), None)


def refuse_other_files(path: Path) -> None:
    """Check that a path leads to a file that PyTorch wrote, by its first and last bytes.

    Raises:
        InputError: The path leads to no file, or to a file of another kind.
    """
    if path.is_dir():
        best = RunFolder(path).checkpoint("best")
        raise InputError(f"{path}: is a folder; give {best if best.is_file() else 'a .ckpt file in it'}")
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: the checkpoint cannot be read (is no regular file)")
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise InputError(f"{path}: the checkpoint cannot be read ({reason})") from error
    if _is_archive(path):
        return
    if start == b"PK\x03\x04":
        raise InputError(f"{path}: the end of the checkpoint is missing; {_remedy(path)}")
    if is_lfs_pointer(path):
        raise InputError(f"{path}: is the pointer of git-LFS, not the checkpoint; run git lfs pull")
    sound = sound_beside(path)
    hint = "one that `captioning fit` wrote" if sound is None else f"{sound}, which is sound"
    raise InputError(f"{path}: not a checkpoint of this project; give {hint}")


def _is_archive(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # it has the end of an archive, but an impossible one
        return False


def _checksums(archive: zipfile.ZipFile) -> frozenset[tuple[int, int]]:
    """Return (CRC-32, bytes) of every tensor, after checking the description of the content.

    The set is empty if the file was written without checksums.

    Raises:
        BadZipFile: The description is damaged.
    """
    entries = archive.infolist()
    if not any(entry.CRC for entry in entries):
        return frozenset()  # torch.serialization.set_crc32_options(False)
    for entry in entries:
        if entry.filename.endswith(("/data.pkl", "/byteorder", "/version")):
            archive.read(entry)
    return frozenset((entry.CRC, entry.file_size) for entry in entries if "/data/" in entry.filename)


def _compare(path: Path, content: Any, checksums: frozenset[tuple[int, int]]) -> None:
    """Refuse a tensor whose memory has none of the file's checksums."""
    seen: set[int] = set()
    for name, tensor in _tensors(content, ""):
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        if (zlib.crc32(raw.numpy().data), storage.nbytes()) not in checksums:
            raise InputError(f"{path}: damaged: {name} is not what was written; {_remedy(path)}")


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.layout is torch.strided:
            yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(inner, f"{name}.{key}".lstrip("."))


def _remedy(path: Path) -> str:
    sound = sound_beside(path)
    return "copy it again, or use " + ("another one" if sound is None else f"{sound}, which is sound")


def _keep_neighbours(path: Path, callbacks: dict[str, Any]) -> None:
    """Let a checkpoint name only files beside it.

    A checkpoint remembers which checkpoints were the best, which are deleted or uploaded later. Their paths are changed
    if the folder was moved or copied. Paths of files in other folders are dropped, because a checkpoint may come from
    somebody else.
    """
    folder = os.path.realpath(path.parent)
    for state in callbacks.values():
        if isinstance(state, dict) and "best_model_path" in state:
            before = state.get("dirpath")
            for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
                state[name] = _beside(folder, state.get(name), before)
            models = state.get("best_k_models")
            if not isinstance(models, dict):
                raise InputError(f"{path}: its best_k_models is no dict; it was edited, use another one")
            best = {_beside(folder, file, before): score for file, score in models.items()}
            state["best_k_models"] = {file: score for file, score in best.items() if file}
            if any(best):
                state["dirpath"] = folder


def _beside(folder: str, file: Any, before: Any) -> str:
    """Return where a file lies in ``folder``, whose name may have been ``before``; "" if it does not."""
    if not isinstance(file, str) or "\0" in file:
        return ""
    if os.path.dirname(os.path.realpath(file)) == folder:
        return file
    moved = os.path.join(folder, os.path.basename(file))
    return moved if os.path.dirname(file) == before and os.path.isfile(moved) else ""
