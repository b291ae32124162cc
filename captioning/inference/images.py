"""Images as callers have them, and how the models see them: paths, PIL images, arrays, tensors, bytes."""

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

from captioning.data.images import FORMATS, load_image, rgb, upright
from captioning.data.transforms import Preprocessing
from captioning.errors import InputError, one_line
from captioning.inference.caption import Photo

ImageSource = str | os.PathLike[str] | Image.Image | bytes | NDArray[Any] | Tensor
"""A path, a PIL image, the bytes of an image file, an array (height, width, 1, 3 or 4) or (height, width), or a tensor
(1, 3 or 4, height, width) or (height, width); numbers are uint8, or floating-point in 0 .. 1."""

_ACCEPTED = "a path, a PIL image, the bytes of an image file, an array or a tensor"
_PHOTO_SIDE = 768  # pixels of a photograph's shorter side, about what a figure shows


def views_of(source: ImageSource, preprocessings: Sequence[Preprocessing]) -> list[Image.Image]:
    """Return the pixels that the models see of an image, for each preprocessing.

    A photograph that its camera marked as rotated is turned upright. So is one of a folder in training; COCO's are
    trained on as they are stored, because their masks are stored so, but hardly any of them are marked.

    Raises:
        InputError: The source is not an image.
    """
    image = open_image(source)
    try:
        return [
            preprocessing.view(upright(rgb(image) if isinstance(image, Image.Image) else preprocessing.load(image)))
            for preprocessing in preprocessings
        ]
    except InputError:
        raise
    except (ValueError, OSError, SyntaxError) as error:  # of Pillow, where an image's file is damaged
        raise InputError(f"image: {error}") from error


def photo_of(source: ImageSource, preprocessing: Preprocessing) -> Photo:
    """Return a whole image with the region that the model sees.

    Raises:
        InputError: The file is no longer an image.
    """
    image = open_image(source)
    photo = upright(rgb(image) if isinstance(image, Image.Image) else load_image(image, minimum_side=_PHOTO_SIDE))
    return photo, preprocessing.region(photo.size)


def is_one(images: ImageSource | Iterable[ImageSource]) -> bool:
    """Return whether this is a single image. An array or a tensor with four dimensions is a batch of images.

    Raises:
        InputError: This is neither one image nor several.
    """
    if isinstance(images, (np.ndarray, Tensor)):
        return images.ndim != 4
    if isinstance(images, (str, os.PathLike, Image.Image, bytes)):
        return True
    if isinstance(images, dict) or not isinstance(images, Iterable):
        raise InputError(f"images: an image is {_ACCEPTED}, or give several of them, got {type(images).__name__}")
    return False


def name_of(source: ImageSource) -> str | None:
    """Return the path of an image; None for one that is given as pixels."""
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else None


def open_image(source: ImageSource) -> Path | Image.Image:
    """Return the path of a file, or the pixels of anything else.

    Raises:
        InputError: The source is not an image.
    """
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, (np.ndarray, Tensor)):
        return _from_numbers(source)
    if isinstance(source, bytes):
        return _from_bytes(source)
    if not isinstance(source, (str, os.PathLike)):
        raise InputError(f"image: must be {_ACCEPTED}, got {type(source).__name__}")
    if isinstance(source, str) and source.startswith(("https://", "http://")):
        raise InputError(f"{source}: is an address; download the image and give its file")
    return Path(source)


def _from_bytes(content: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        image.load()
    except Exception as error:  # Pillow raises errors of many types for damaged bytes
        raise InputError(f"bytes: {len(content):,} bytes that are no image file ({one_line(error, 120)})") from error
    return image


def _from_numbers(source: NDArray[Any] | Tensor) -> Image.Image:
    """Return an array (.., channels) or a tensor (channels, ..) as RGB."""
    if isinstance(source, Tensor):
        kind, expected = "tensor", "(1, 3 or 4, height, width)"
        pixels = source.detach().cpu()
        pixels = pixels.float() if pixels.dtype in (torch.bfloat16, torch.float16) else pixels
        values: NDArray[Any] = pixels.permute(1, 2, 0).numpy() if pixels.ndim == 3 else pixels.numpy()
    else:
        kind, expected, values = "array", "(height, width, 1, 3 or 4)", source
    shape = tuple(source.shape)
    if values.ndim not in (2, 3) or 0 in shape or (values.ndim == 3 and values.shape[-1] not in (1, 3, 4)):
        raise InputError(f"image: {kind} must be {expected} or (height, width), got {shape}")
    if np.issubdtype(values.dtype, np.floating):
        low, high = float(values.min()), float(values.max())
        if not 0 <= low <= high <= 1:  # false for NaN, too
            raise InputError(f"image: {kind} of {values.dtype} must lie in 0 .. 1, got {low:g} .. {high:g}")
        values = np.rint(values * 255).astype(np.uint8)
    if values.dtype != np.uint8:
        raise InputError(f"image: {kind} must be uint8, or floating-point in 0 .. 1, got {values.dtype}")
    squeezed = values[..., 0] if values.ndim == 3 and values.shape[-1] == 1 else values
    return rgb(Image.fromarray(np.ascontiguousarray(squeezed)))
