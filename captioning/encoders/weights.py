"""Weights from files, which are read without running code in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from captioning.errors import InputError, one_line
from captioning.files import is_lfs_pointer

OPTION = "model.encoder.init_args.weights"


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a ``.safetensors`` file, or of a ``.pth``, ``.pt`` or ``.bin`` file of nothing but tensors.

    Raises:
        InputError: The file is missing or damaged, or holds more than tensors.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"{OPTION}: {path} is no file; `captioning prepare weights` fetches those of the configs")
    if is_lfs_pointer(path):
        raise InputError(f"{path}: is the pointer of git-LFS, not the weights; run git lfs pull")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
        for key in ("state_dict", "model"):  # training scripts wrap it so
            loaded = loaded[key] if isinstance(loaded.get(key), dict) else loaded
    except Exception as error:  # of many types, where the file is damaged or is refused
        raise InputError(f"{path}: no file of a network's state_dict() alone ({one_line(error)})") from error
    return dict(loaded)


def load_weights(
    network: nn.Module, tensors: dict[str, Tensor], source: str | Path, rename: Callable[[str], str] = str
) -> None:
    """Copy a file's tensors into a network, which may be a part of the file's.

    Args:
        network: The network. All of its tensors must be in the file with their exact shapes.
        tensors: The file's content.
        source: The file, for messages.
        rename: From a name in ``network`` to the name of the same tensor in the whole network.

    Raises:
        InputError: A tensor is missing, of another shape, or the matrix or kernel of a layer and all zeros.
    """
    names = {name: name if name in tensors else rename(name) for name in network.state_dict()}
    weights = {name: tensors[theirs] for name, theirs in names.items() if theirs in tensors}
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(f"{source}: the file of another network ({one_line(error)})") from error
    if zero := next((name for name, tensor in weights.items() if tensor.ndim > 1 and not tensor.any()), None):
        raise InputError(f"{source}: {zero!r} is all zeros: the file lacks this layer; choose an output before it")
