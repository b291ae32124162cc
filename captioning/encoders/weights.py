"""Weights from files, which are read without running code in them."""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from captioning.errors import InputError, is_out_of_memory, one_line
from captioning.files import is_lfs_pointer

OPTION = "model.encoder.init_args.weights"


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a ``.safetensors`` file, or a ``.pth``, ``.pt`` or ``.bin`` file that holds nothing but tensors.

    Tensors are mapped where the format allows: the 500 MB of VGG's unused classifier stay on the disk.

    Raises:
        InputError: The file is missing or damaged, holds more than tensors, or is not a state dict.
    """
    path = Path(os.path.expanduser(path))
    if not path.is_file():
        raise InputError(f"{OPTION}: {path} is no file; `captioning prepare weights` fetches those of the configs")
    if is_lfs_pointer(path):
        raise InputError(f"{path}: is the pointer of git-LFS, not the weights; run git lfs pull")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: not a safetensors file ({error})") from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # the file is refused anyway
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path}: holds more than tensors (or is damaged), and is not opened because that could run code in it; "
            "save the network's state_dict() alone"
        ) from error
    except Exception as error:  # a text or a damaged file makes PyTorch raise errors of many types
        if is_out_of_memory(error):
            raise
        raise InputError(f"{path}: not a PyTorch file ({one_line(error)})") from error
    for key in ("state_dict", "model"):  # training scripts wrap it so
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise InputError(f"{path}: not a state dict; save the network's state_dict() alone")
    return dict(loaded)


def load_weights(
    network: nn.Module,
    tensors: dict[str, Tensor],
    *,
    source: str | Path,
    unused: Callable[[], Collection[str]],
    rename: Callable[[str], str] = lambda name: name,
) -> None:
    """Copy a file's tensors into the used part of a network.

    Args:
        network: The network. Every parameter and buffer must be in the file with its exact shape.
        tensors: The file's content.
        source: The file, for messages.
        unused: Returns the names that the whole network has and ``network`` lacks; called only if needed. The file may
            have these names besides.
        rename: From a name in ``network`` to the name of the same tensor in the whole network.

    Raises:
        InputError: A tensor is missing, unknown, of another shape, or the matrix or kernel of a layer and all zeros.
    """
    state = network.state_dict()
    names = {name: rename(name) if name not in tensors and rename(name) in tensors else name for name in state}
    missing = [name for name in state if names[name] not in tensors and not name.endswith("num_batches_tracked")]
    unknown = set(tensors) - set(names.values())
    if unknown and not missing:
        unknown -= set(unused())
    for problem, wrong in (("has no", missing), ("has an unknown", sorted(unknown))):
        if wrong:
            raise InputError(
                f"{source}: {problem} {wrong[0]!r}"
                + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
                + "; it is the file of another network, or another name for its layers"
            )
    weights = {name: tensors[names[name]] for name in state if names[name] in tensors}
    for name, tensor in weights.items():
        if tensor.shape != state[name].shape:
            shapes = f"{tuple(tensor.shape)}, the network needs {tuple(state[name].shape)}"
            raise InputError(f"{source}: {names[name]!r} is {shapes}; it is the file of another network")
        if tensor.ndim > 1 and not tensor.any():  # no trained layer is
            reason = "is all zeros: the file lacks this layer; give another file, or an output before the layer"
            raise InputError(f"{source}: {names[name]!r} {reason}")
    network.load_state_dict(weights, strict=True)
