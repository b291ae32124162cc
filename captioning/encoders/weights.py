"""Weights from files, read without running anything that is in them."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from captioning.errors import InputError

OPTION = "model.encoder.init_args.weights"


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a ``.safetensors`` file, or a ``.pth``/``.pt``/``.bin`` one that holds nothing but tensors.

    Tensors are mapped, not read, where the format allows: the 500 MB of VGG's unused classifier stay on the disk.

    Raises:
        InputError: the file is missing or damaged, holds code, or is not a state dict.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"{OPTION}: {path} is no file; `scripts/prepare_data.py weights` fetches those of the configs")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise InputError(f"{path}: not a safetensors file ({error})") from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # of a file that is then refused
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path}: holds more than tensors (or is damaged), and is not opened because that could run code in it; "
            "save the network's state_dict() alone"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: not a PyTorch file ({_line(error)})") from error
    for key in ("state_dict", "model"):  # as training scripts wrap it
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
        network: takes the weights; every parameter and buffer must be in the file with its exact shape.
        tensors: the file's content.
        source: the file, for messages.
        unused: gives the names that the whole network has and ``network`` does not; asked for only if needed. Exactly
            these may be in the file besides.
        rename: from a name in ``network`` to the name the whole network gives the same tensor.

    Raises:
        InputError: a tensor is missing, unknown, or of another shape.
    """
    wanted = network.state_dict()
    found = {name: rename(name) if name not in tensors and rename(name) in tensors else name for name in wanted}
    missing = [n for n in wanted if found[n] not in tensors and not n.endswith("num_batches_tracked")]
    unknown = set(tensors) - set(found.values())
    if unknown and not missing:
        unknown -= set(unused())
    for what, names in (("has no", missing), ("has an unknown", sorted(unknown))):
        if names:
            raise InputError(
                f"{source}: {what} {names[0]!r}"
                + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
                + "; it is the file of another network, or another name for its layers"
            )
    for name, tensor in wanted.items():
        if found[name] in tensors and tensors[found[name]].shape != tensor.shape:
            shapes = f"{tuple(tensors[found[name]].shape)}, the network needs {tuple(tensor.shape)}"
            raise InputError(f"{source}: {found[name]!r} is {shapes}; it is the file of another network")
    network.load_state_dict({name: tensors[found[name]] for name in wanted if found[name] in tensors}, strict=True)


def _line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
