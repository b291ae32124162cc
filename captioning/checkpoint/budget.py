"""What reading a checkpoint may cost, known before it is paid: bytes of its sections, values, numbers of tensors."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from captioning.errors import InputError

_MAX_VALUES, _MAX_DEPTH = 2_000_000, 100
_MAX_COUNT = 2**53  # of batches, steps and epochs


def refuse_inflated_archive(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse an archive whose sections together have more bytes than the file. PyTorch compresses none.

    Raises:
        InputError: Names the number of bytes.
    """
    size, there = sum(entry.file_size for entry in archive.infolist()), path.stat().st_size
    if size > there:
        raise InputError(f"{path}: claims {size:,} bytes in a file of {there:,}; a checkpoint is not compressed")


def refuse_inflated_values(path: Path, content: Any) -> None:
    """Refuse a checkpoint that stands for more than its bytes: by tensors or lists that are used many times over.

    Raises:
        InputError: Names the tensor or the number.
    """
    counts: dict[int, int] = {}

    def count(value: Any, name: str, depth: int) -> int:
        if isinstance(value, torch.Tensor):
            _refuse_inflated_tensor(path, value, name)
        if not isinstance(value, (dict, list, tuple)):
            return 1
        if depth > _MAX_DEPTH:
            raise InputError(f"{path}: {name[:60]} is nested more than {_MAX_DEPTH} levels deep; it was edited")
        if id(value) not in counts:
            counts[id(value)] = _MAX_VALUES + 1  # of a list inside itself
            items = value.items() if isinstance(value, dict) else enumerate(value)
            counts[id(value)] = 1 + sum(count(inner, f"{name}.{key}", depth + 1) for key, inner in items)
        if counts[id(value)] > _MAX_VALUES:
            raise InputError(f"{path}: {name[:60] or 'it'} stands for more than {_MAX_VALUES:,} values; it was edited")
        return counts[id(value)]

    count(content, "", 0)


def _refuse_inflated_tensor(path: Path, tensor: torch.Tensor, name: str) -> None:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise InputError(f"{path}: {name.lstrip('.')} is no plain tensor; it was edited")
    size, there = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if size > there:
        raise InputError(f"{path}: {name.lstrip('.')} claims {size:,} bytes of {there:,}; it was edited")


def refuse_impossible_counts(path: Path, value: Any, name: str) -> None:
    """Refuse counts of batches, steps and epochs that no run reaches: training would never end.

    Raises:
        InputError: Names the number.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            refuse_impossible_counts(path, inner, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            refuse_impossible_counts(path, inner, name)
    elif isinstance(value, (int, float)) and not 0 <= value <= _MAX_COUNT:
        raise InputError(f"{path}: {name} is {value}, which no run counts; it was edited, use another one")
