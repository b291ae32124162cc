"""Checkpoint files: reading one runs none of its code, and a crash while one is written leaves the old file."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from captioning.errors import InputError, one_line
from captioning.files import is_lfs_pointer, replacing
from captioning.run_folder import RunFolder


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what `captioning fit` saved, on the CPU, without running code in the file.

    Tensors are read on first use, so that the optimizer's state, two thirds of the file, stays on the disk. Raise
    InputError if the file is missing, damaged, or another project's.
    """
    if path.is_dir():
        best = RunFolder(path).checkpoint("best")
        raise InputError(f"{path}: is a folder; give {best if best.is_file() else 'a .ckpt file in it'}")
    if is_lfs_pointer(path):
        raise InputError(f"{path}: is the pointer of git-LFS, not the checkpoint; run git lfs pull")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path}: not a checkpoint of this project: it holds objects beside weights and plain data (opening it "
            "could run code), or is damaged"
        ) from error
    except (FileNotFoundError, PermissionError) as error:
        raise InputError(f"{path}: the checkpoint cannot be read ({error.strerror})") from error
    except Exception as error:  # a damaged file makes PyTorch raise errors of many types
        raise InputError(f"{path}: damaged, or not a checkpoint ({one_line(error, 120)}); copy it again") from error
    if not isinstance(checkpoint, dict) or not {"captioning", "state_dict"} <= checkpoint.keys():
        raise InputError(f"{path}: not a checkpoint of this project; give one that `captioning fit` wrote")
    return checkpoint


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint; on a full disk or without permission, raise InputError and leave the old file unchanged."""
    content = io.BytesIO()  # torch.save's own message about a full disk does not mention the disk
    torch.save(checkpoint, content)
    with replacing(path) as part:
        part.write_bytes(content.getbuffer())
