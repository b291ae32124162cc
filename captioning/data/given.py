"""Images as callers have them: paths, PIL images, arrays, tensors, the bytes of a file, addresses."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from captioning.errors import InputError

ImageSource = str | os.PathLike[str] | Image.Image | bytes | NDArray[Any] | Tensor
"""A path or https address, a PIL image, the bytes of an image file, an array (height, width, 1, 3 or 4) or (height,
width), or a tensor (1, 3 or 4, height, width) or (height, width); numbers are uint8, or floating-point in 0 .. 1."""

_ACCEPTED = "a path, a PIL image, the bytes of an image file, an array, a tensor or an https address"


def is_one(images: ImageSource | Iterable[ImageSource]) -> bool:
    """Return whether this is one image; an array or a tensor with four dimensions is a batch of them.

    Raises:
        InputError: it is neither an image nor several.
    """
    if isinstance(images, (np.ndarray, Tensor)):
        return images.ndim != 4
    if isinstance(images, (str, os.PathLike, Image.Image, bytes, bytearray, memoryview)):
        return True
    if isinstance(images, dict) or not isinstance(images, Iterable):
        raise InputError(f"images: an image is {_ACCEPTED}, or give several of them, got {_said(images)}")
    return False


def name_of(source: ImageSource) -> str | None:
    """Return the path or address of an image; None for one that is given as pixels."""
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else None


def opened(source: ImageSource, *, download: bool = False) -> Path | Image.Image:
    """Return the path of a file, or the pixels of anything else.

    Args:
        download: follow an https address; it is refused otherwise, so that a list of names makes no connections.

    Raises:
        InputError: it is no image, and what it is.
    """
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, (np.ndarray, Tensor)):
        return _from_numbers(source)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _from_bytes(bytes(source), "bytes")
    if not isinstance(source, (str, os.PathLike)):
        raise InputError(f"image: must be {_ACCEPTED}, got {_said(source)}")
    if isinstance(source, str) and source.startswith(("https://", "http://")):
        if not download:
            raise InputError(f"{source}: is an address; save the image as a file, or in Python give download=True")
        from captioning.data.download import fetch_image

        return _from_bytes(fetch_image(source), source)
    return Path(source)


def _from_bytes(content: bytes, name: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(content))
        image.load()
    except Exception as error:  # which one Pillow raises on damaged bytes is up to the format
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise InputError(f"{name}: {len(content):,} bytes that are no image file ({reason})") from error
    return image


def _from_numbers(source: NDArray[Any] | Tensor) -> Image.Image:
    """Return an array (.., channels) or a tensor (channels, ..) as RGB."""
    kind = "tensor" if isinstance(source, Tensor) else "array"
    if isinstance(source, Tensor):
        pixels = source.detach().cpu()
        pixels = pixels.float() if pixels.dtype in (torch.bfloat16, torch.float16) else pixels
        values: NDArray[Any] = pixels.permute(1, 2, 0).numpy() if pixels.ndim == 3 else pixels.numpy()
    else:
        values = source
    shape = tuple(source.shape)
    if values.ndim not in (2, 3) or 0 in shape or (values.ndim == 3 and values.shape[-1] not in (1, 3, 4)):
        wanted = "(1, 3 or 4, height, width)" if kind == "tensor" else "(height, width, 1, 3 or 4)"
        raise InputError(f"image: {kind} must be {wanted} or (height, width), got {shape}")
    if np.issubdtype(values.dtype, np.floating):
        low, high = float(values.min()), float(values.max())
        if not 0 <= low <= high <= 1:  # false for NaN, too
            raise InputError(f"image: {kind} of {values.dtype} must lie in 0 .. 1, got {low:g} .. {high:g}")
        values = np.rint(values * 255).astype(np.uint8)
    if values.dtype != np.uint8:
        raise InputError(f"image: {kind} must be uint8, or floating-point in 0 .. 1, got {values.dtype}")
    squeezed = values[..., 0] if values.ndim == 3 and values.shape[-1] == 1 else values
    image = Image.fromarray(np.ascontiguousarray(squeezed))
    if image.mode == "RGBA":  # as of a file: transparency on white
        canvas = Image.new("RGB", image.size, "white")
        canvas.paste(image, mask=image.getchannel("A"))
        return canvas
    return image.convert("RGB")


def _said(value: object) -> str:
    shown = repr(value)
    kind = type(value).__name__
    several = f" of {len(value)}" if isinstance(value, Sequence) else ""
    return f"{kind}{several}" if len(shown) > 60 else f"{kind} {shown}"
